"""Describe how a supervisor runs an embedded server."""

import signal
from dataclasses import dataclass

POSTGRES, VALKEY = "postgres", "valkey"  # names, and folders in the state folder
START_SECONDS = 20.0  # that a server may take to start


@dataclass(frozen=True)
class ServerCommand:
    """How a supervisor runs a server as its child."""

    name: str  # POSTGRES or VALKEY
    command: tuple[str, ...]
    url: str  # the same after each start
    user: str = ""  # the system user that must run it; "" for this process's own
    stop_signal: int = signal.SIGTERM  # at which it ends at once and in order
