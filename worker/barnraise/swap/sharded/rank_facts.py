"""What all ranks must agree on before they exchange anything, and how they find out."""

import contextlib
import json
import platform
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch

from barnraise import __version__
from barnraise.errors import StateError
from barnraise.swap.sharded.key_value_store import Store

REACH_SECONDS = 60.0  # within which all ranks must have reached each other
# A fact's name, and what it is in a sentence.
FACTS = {
    "torch": "another version of PyTorch",
    "barnraise": "another version of Barnraise",
    "cpu": "another kind of CPU",
    "device": "another kind of device",
    "command": "another run, or other options",
}


def collect_facts(device: torch.device, command: str) -> dict[str, str]:
    """Return this rank's facts; `command` describes what it was started for."""
    return {
        "torch": torch.__version__,
        "barnraise": __version__,
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "device": device.type,
        "command": command,
    }


def agree_on_facts(store: Store, rank: int, ranks: int, facts: Mapping[str, str]) -> None:
    """Exchange the ranks' facts; each rank compares all of them with rank 0's.

    Raises:
        StateError: a rank did not answer in time, or its facts differ.
    """
    store.set(f"facts/{rank}", json.dumps(dict(facts)))
    keys = [f"facts/{other}" for other in range(ranks)]
    try:
        store.wait(keys, timedelta(seconds=REACH_SECONDS))
        first, *others = (json.loads(store.get(key)) for key in keys)
    except RuntimeError:
        raise StateError(_describe_missing(store, keys)) from None
    for number, other in enumerate(others, 1):
        for name, description in FACTS.items():
            if other.get(name) != first[name]:
                raise StateError(
                    f"rank {number} has {description} ({other.get(name)}) than rank 0 "
                    f"({first[name]}): all ranks must be alike"
                )


def _describe_missing(store: Store, keys: Sequence[str]) -> str:
    """Return a sentence about the ranks that did not answer."""
    missing = ["0"]
    with contextlib.suppress(RuntimeError):  # rank 0 has ended, and its store with it
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
    return (
        f"rank {', '.join(missing)} of {len(keys)} has not answered within {REACH_SECONDS:.0f} s: "
        "start all of them, on machines that reach each other at every TCP port"
    )
