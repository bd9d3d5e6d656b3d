"""Recognise the ranks that `torchrun` starts, by torch's environment variables. Without torch."""

import os
from collections.abc import Mapping

from barnraise.errors import StateError


def count_ranks(environment: Mapping[str, str] = os.environ) -> int:
    """Return of how many ranks this process is one; 1 if torchrun has not started it."""
    count = environment.get("WORLD_SIZE", "1")
    return int(count) if "RANK" in environment and count.isdigit() else 1


def is_first_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is the worker; other ranks obey it."""
    return environment.get("RANK", "0") == "0"


def refuse_other_engine(engine: str, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse ranks that would each join as the same machine.

    Raises:
        StateError: another engine than the sharded one was chosen.
    """
    count = count_ranks(environment)
    if count > 1 and engine != "sharded":
        raise StateError(
            f"torchrun has started {count} processes, which would all join as this machine: add "
            "--engine sharded, so that they train as one, or start without torchrun"
        )
