"""Name people where somebody judges them: two may have one name, but never one key."""

from collections import defaultdict
from uuid import UUID

from coordinator.accounts.models import User
from coordinator.runs.models import Run

KEY_DIGITS = 16  # of a key, as the worker prints it
KEYS_SHOWN = 3


def list_keys(run: Run) -> dict[UUID, list[str]]:
    """Return the keys with which each person takes part in a run."""
    keys: dict[UUID, list[str]] = defaultdict(list)
    for person, key in run.memberships.order_by("pk").values_list("machine__owner", "machine__key"):
        keys[person].append(key)
    return keys


def mark_name(person: User, keys: dict[UUID, list[str]]) -> str:
    """Return a person's name with the starts of their keys in the run."""
    starts = [key[:KEY_DIGITS] for key in keys.get(person.pk, [])]
    more = ["…"] if len(starts) > KEYS_SHOWN else []
    marks = ", ".join([*starts[:KEYS_SHOWN], *more]) or "no machine"
    return f"{person.shown_name} ({marks})"
