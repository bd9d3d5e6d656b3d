"""Find where a folder's drive is mounted."""

from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Mount:
    """Where a drive is mounted."""

    point: str  # the folder of the mount
    kind: str  # the file system
    options: str = ""  # as the system lists them; Windows lists whether a drive is removable


def find_mount(folder: Path) -> Mount | None:
    """Return the mount on which a folder lies; None where it is not listed."""
    try:
        mounts = psutil.disk_partitions(all=True)
    except OSError:
        return None
    path = folder.resolve()
    around = [mount for mount in mounts if path.is_relative_to(mount.mountpoint)]
    # Of several mounts at the same place, the last one is seen.
    around.sort(key=lambda mount: len(Path(mount.mountpoint).parts))
    return Mount(around[-1].mountpoint, around[-1].fstype, around[-1].opts) if around else None
