"""Let another process register as the worker of a run's folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.python_code import start_python

REGISTER = """
import sys
from pathlib import Path
from barnraise.training.local_control import LocalControl

LocalControl(Path(sys.argv[1])).register_worker(trains=sys.argv[2] == "True")
print("registered", flush=True)
sys.stdin.read()
"""


@contextmanager
def other_worker(folder: Path, trains: bool = True) -> Iterator[int]:
    """Yield the id of a process that is the folder's worker while the block runs."""
    worker = start_python(REGISTER, folder, trains, stdin=-1)
    try:
        assert worker.stdout is not None and worker.stdout.readline() == "registered\n"
        yield worker.pid
    finally:
        worker.communicate("", timeout=60)
