"""Read the source of this Python's standard library: a text that every machine has."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

from blake3 import blake3

from barnraise.errors import TextError

EXCLUDED_FOLDERS = {"test", "tests", "idlelib", "site-packages"}


def read_stdlib() -> Iterator[bytes]:
    """Read the *.py files of this Python's standard library, sorted by path, each content once.

    A copy could otherwise be on both sides of the split. Raises TextError if there are no files.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    included = sorted(
        (path.as_posix(), path) for path in paths if not EXCLUDED_FOLDERS & set(path.parent.parts)
    )
    if not included:
        raise TextError(
            f"there are no *.py files under {root}: this Python came without its library's source"
        )
    seen: set[bytes] = set()
    for _, path in included:
        content = (root / path).read_bytes()
        digest = blake3(content).digest()
        if content and digest not in seen:
            seen.add(digest)
            yield content
