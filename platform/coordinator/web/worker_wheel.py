"""The worker's wheel that this site offers, as `make wheel` built it."""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from django.conf import settings

CONSTRAINTS = "constraints.txt"  # the tested versions of all that the wheel brings


@dataclass(frozen=True)
class WorkerWheel:
    """A wheel with what people need to check it."""

    name: str  # pip requires that it stays as it is
    version: str  # of the worker
    size: int  # bytes
    sha256: str  # in hexadecimal digits
    path: Path


def find_wheel() -> WorkerWheel | None:
    """Return the wheel; None if none was built."""
    wheels = sorted(settings.WHEEL_DIR.glob("barnraise-*.whl"))
    if not wheels:
        return None
    try:
        stat = wheels[-1].stat()
    except FileNotFoundError:  # replaced at this moment by another version
        return None
    return _describe(wheels[-1], stat.st_mtime_ns, stat.st_size)


def read_constraints() -> bytes | None:
    """Return the constraints that were built with the wheel; None if none were."""
    try:
        return (settings.WHEEL_DIR / CONSTRAINTS).read_bytes()
    except FileNotFoundError:
        return None


def read_pins() -> list[str]:
    """Return the lines of the constraints that pin a version; [] if none were built."""
    lines = (read_constraints() or b"").decode().splitlines()
    return [line for line in lines if not line.startswith("#")]


@lru_cache(maxsize=4)
def _describe(path: Path, modified_ns: int, size: int) -> WorkerWheel:
    """Read and digest the file; another time of modification makes the cache read it again."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return WorkerWheel(path.name, path.name.split("-")[1], size, digest, path)
