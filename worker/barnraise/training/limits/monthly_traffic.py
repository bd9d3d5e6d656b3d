"""Count what this machine sends to peers in a calendar month, over all its runs and restarts."""

import json
from pathlib import Path

from barnraise.durable_io import write_atomically

FILE_NAME = "traffic.json"
SAVE_BYTES = 16 << 20  # that a crash may leave uncounted


class MonthlyTraffic:
    """The bytes sent in this month, in a file of the machine's state directory."""

    def __init__(self, folder: Path) -> None:
        """Go on with the count that the folder's file holds."""
        self._path = folder / FILE_NAME
        self._month = ""
        self._sent = 0
        self._saved = 0  # bytes in the file
        self._seen = 0  # this process's bytes at the last call

    def record(self, process_bytes: int, month: str) -> int:
        """Record how many bytes this process has sent so far.

        Args:
            process_bytes: since it started, over connections of now and before.
            month: the current one, like "2026-11".

        Returns:
            The bytes that this machine has sent in this month.
        """
        if month != self._month:
            self._month = month
            self._sent = self._saved = self._load()
        self._sent += max(0, process_bytes - self._seen)
        self._seen = process_bytes
        if self._sent - self._saved >= SAVE_BYTES:
            self.save()
        return self._sent

    def save(self) -> None:
        """Store the count."""
        if self._sent > self._saved:
            fields = {"month": self._month, "sent": self._sent}
            write_atomically(self._path, json.dumps(fields).encode())
            self._saved = self._sent

    def _load(self) -> int:
        """Return the bytes in the file; 0 if it is of another month, or damaged."""
        try:
            fields = json.loads(self._path.read_bytes())
            return int(fields["sent"]) if fields["month"] == self._month else 0
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return 0
