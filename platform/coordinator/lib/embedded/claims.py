"""Find out who runs the servers of a state folder: the processes that use them, or a supervisor."""

import json
from pathlib import Path

from filelock import FileLock, Timeout

from coordinator.lib.process_identity import is_same_process, start_time


def list_users(state: Path) -> list[int]:
    """Return the processes that use the servers and still run."""
    try:
        listed = json.loads((state / "services.json").read_text())
    except (FileNotFoundError, ValueError):
        return []
    return [pid for pid, started in listed if is_same_process(pid, started)]


def write_users(state: Path, pids: list[int]) -> None:
    """Store which processes use the servers."""
    unfinished = state / "services.json.new"
    unfinished.write_text(json.dumps([(pid, start_time(pid)) for pid in pids]))
    unfinished.replace(state / "services.json")


def is_supervised(state: Path) -> bool:
    """Return whether a supervisor runs the servers of this state folder."""
    lock = supervisor_lock(state)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    lock.release()
    return False


def supervisor_lock(state: Path) -> FileLock:
    """Return the lock that the supervisor of the servers has as long as it runs them."""
    return FileLock(state.resolve() / "supervisor.lock")
