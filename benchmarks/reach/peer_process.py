"""Start peers in namespaces, and wait for what they print."""

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reach_network import Place
from reach_peer import PeerSetup, identity_of

PROGRAM = Path(__file__).parent / "reach_peer.py"
START_SECONDS = 120.0  # until a peer prints its first line: importing torch takes long under load


class PeerProcess:
    """A peer that runs in a namespace.

    Attributes:
        key: Its key.
        place: Where it runs.
        state: What it printed last.
    """

    def __init__(self, place: Place, number: int, folder: Path, **setup: Any) -> None:
        """Start the peer; `setup` are fields of its `PeerSetup`."""
        self.place = place
        self.number = number
        self.key = identity_of(number).key
        self.state: dict[str, Any] = {}
        self.started_at = time.monotonic()
        state_folder = tempfile.mkdtemp(prefix=f"peer{number}-", dir=folder)
        command = PeerSetup(number=number, folder=state_folder, **setup).to_json()
        with (folder / f"peer{number}.log").open("ab") as log:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", place.namespace, sys.executable, str(PROGRAM), command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.state = json.loads(line)

    def add_peers(self, peers: dict[str, list[str]]) -> None:
        """Name other peers to it, as a coordinator does."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(peers) + "\n")
        self.process.stdin.flush()

    def is_linked(self, other: "PeerProcess") -> bool:
        """Return whether it is linked to another peer."""
        return other.key in self.state.get("links", {})

    def wait_until(self, condition: Callable[[dict[str, Any]], bool], seconds: float) -> float:
        """Wait for what the peer prints.

        Returns:
            The seconds that it took; inf if it did not happen.
        """
        began_at = time.monotonic()
        while time.monotonic() < began_at + seconds:
            if self.state and condition(self.state):
                return time.monotonic() - began_at
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        return float("inf")

    def wait_ready(self) -> None:
        """Wait until the peer runs.

        Raises:
            RuntimeError: It does not start.
        """
        if self.wait_until(lambda state: True, START_SECONDS) == float("inf"):
            raise RuntimeError(f"peer {self.number} in {self.place.namespace} does not start")

    def kill(self) -> None:
        """Kill the peer without notice to the others."""
        self.process.kill()
        self.process.wait()

    def leave(self, seconds: float = 30.0) -> None:
        """Let the peer leave in order; kill it if that takes too long."""
        if self.process.poll() is None and self.process.stdin is not None:
            self.process.stdin.close()
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.kill()
