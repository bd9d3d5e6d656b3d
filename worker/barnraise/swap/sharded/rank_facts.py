"""What all ranks must agree on before they exchange anything, and how they find out."""

import json
import platform
from collections.abc import Mapping
from datetime import timedelta

import torch

from barnraise import __version__
from barnraise.errors import StateError
from barnraise.swap.sharded.key_value_store import Store

REACH_SECONDS = 60.0  # within which all ranks must have reached each other
VERDICT_SECONDS = 5.0  # that rank 0 may take longer, because it waits for the others
AGREED = "agreed"
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
    """Exchange the ranks' facts, and wait until rank 0 has compared all of them.

    Raises:
        StateError: a rank did not answer in time, or its facts differ; all ranks get the sentence.
    """
    store.set(f"facts/{rank}", json.dumps(dict(facts)))
    if rank == 0:
        verdict = _compare_facts(store, ranks, facts)
        store.set("verdict", verdict)
    else:
        timeout = timedelta(seconds=REACH_SECONDS + VERDICT_SECONDS)
        try:
            store.wait(["verdict"], timeout)
        except RuntimeError:
            raise StateError(f"rank 0 has not answered within {REACH_SECONDS:.0f} s") from None
        verdict = store.get("verdict").decode(errors="replace")
    if verdict != AGREED:
        raise StateError(verdict)


def _compare_facts(store: Store, ranks: int, facts: Mapping[str, str]) -> str:
    """Return AGREED, or a sentence about the first rank that is missing or different."""
    keys = [f"facts/{rank}" for rank in range(1, ranks)]
    try:
        store.wait(keys, timedelta(seconds=REACH_SECONDS))
    except RuntimeError:
        missing = [str(rank) for rank, key in enumerate(keys, 1) if not store.check([key])]
        return (
            f"rank {', '.join(missing)} of {ranks} has not answered within {REACH_SECONDS:.0f} s: "
            "start all of them, on machines that reach each other at every TCP port"
        )
    for rank, key in enumerate(keys, 1):
        others: dict[str, str] = json.loads(store.get(key))
        for name, description in FACTS.items():
            if others.get(name) != facts[name]:
                return (
                    f"rank {rank} has {description} ({others.get(name)}) than rank 0 "
                    f"({facts[name]}): all ranks must be alike"
                )
    return AGREED
