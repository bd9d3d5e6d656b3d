"""Stop the servers of a test process that was killed, and remove its state folder.

A killed process runs no code of its own, so another one waits for its end: `start_guard` starts
`python server_guard.py STATE` with a pipe that only the test process has open. The pipe ends with
that process, however it ends; one that has ended in order has removed its folder before.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from helpers.paths import ROOT, TESTS


def start_guard(state: Path) -> subprocess.Popen[bytes]:
    """Start the process that stops the servers of a state folder after this process.

    Returns:
        The guard, to be killed after the servers have been stopped in order.
    """
    folders = [ROOT / "platform", ROOT / "worker", TESTS]
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", __file__, str(state)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # a terminal's Ctrl-C ends the tests, not their guard
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
    )


def main() -> None:
    """Wait for the end of the standard input, then stop what still runs."""
    state = Path(sys.argv[1])
    sys.stdin.read()
    if state.exists():
        from coordinator.lib.embedded import embedded_servers

        embedded_servers.stop(state, force=True)
        shutil.rmtree(state, ignore_errors=True)


if __name__ == "__main__":
    main()
