"""When this site was last backed up: a file in the state folder that `manage.py backup` writes."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

LATE_DAYS = 2.0
RECORD = "last_backup.json"


@dataclass(frozen=True)
class BackupRecord:
    """A finished backup."""

    at: float  # when it finished, in seconds since 1970
    folder: str  # where it lies
    size: int  # bytes of its files

    @property
    def age_days(self) -> float:
        """Days since it finished."""
        return max(0.0, time.time() - self.at) / 86_400

    @property
    def age_seconds(self) -> float:
        """Seconds since it finished."""
        return self.age_days * 86_400

    @property
    def is_late(self) -> bool:
        """Whether the next backup is due since long."""
        return self.age_days > LATE_DAYS


def record_backup(state: Path, files: list[Path]) -> BackupRecord:
    """Record a backup of these files, durably enough for a reader at any moment."""
    size = sum(path.stat().st_size for path in files)
    row = BackupRecord(time.time(), str(files[0].parent.resolve()), size)
    unfinished = state / f"{RECORD}.new"
    unfinished.write_text(json.dumps(asdict(row)))
    unfinished.replace(state / RECORD)
    return row


def read_last_backup(state: Path) -> BackupRecord | None:
    """Return the last backup; None if there was none, or the file is damaged."""
    try:
        return BackupRecord(**json.loads((state / RECORD).read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
