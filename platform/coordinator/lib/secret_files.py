"""Store secret texts in files."""

import os
import secrets
from pathlib import Path

from filelock import FileLock


def load_or_create_secret(path: Path) -> str:
    """Return a random text from a file that only its owner can read, created on first use."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            unfinished = path.with_suffix(".new")
            unfinished.unlink(missing_ok=True)
            exclusive = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with os.fdopen(os.open(unfinished, exclusive, 0o600), "w") as file:
                file.write(secrets.token_urlsafe(48))
            unfinished.replace(path)
        return path.read_text()
