"""Name people and machines by their keys where a name stands for two of them."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from uuid import UUID

from coordinator.accounts.models import Machine, User, marked_name
from coordinator.runs.models import Run

KEY_DIGITS = 16  # of a key, as the worker prints it
KEYS_SHOWN = 3


def list_keys(run: Run) -> dict[UUID, list[str]]:
    """Return the keys with which each person takes part in a run."""
    keys: dict[UUID, list[str]] = defaultdict(list)
    for person, key in run.memberships.order_by("pk").values_list("machine__owner", "machine__key"):
        keys[person].append(key)
    return keys


def isolate_name(name: str) -> str:
    """Isolate a name of other letters (Unicode TR 9): it turns no sentence around it.

    Choices of a form and letters have no element for that.
    """
    return name if name.isascii() else f"\u2068{name}\u2069"


def mark_name(person: User, keys: dict[UUID, list[str]]) -> str:
    """Return a person's name with the starts of their keys in the run."""
    starts = [key[:KEY_DIGITS] for key in keys.get(person.pk, [])]
    more = ["…"] if len(starts) > KEYS_SHOWN else []
    marks = ", ".join([*starts[:KEYS_SHOWN], *more]) or "no machine"
    return f"{isolate_name(person.shown_name)} ({marks})"


def twin_names(machines: Iterable[Machine]) -> dict[UUID, str]:
    """Return the names of those machines whose owner has two of one name, with their keys."""
    machines = list(machines)
    names = Counter((machine.owner_id, machine.name) for machine in machines)
    return {
        machine.pk: marked_name(machine.name, machine.key)
        for machine in machines
        if names[machine.owner_id, machine.name] > 1
    }


def twin_names_in(run: Run) -> dict[UUID, str]:
    """Return the same of the machines of a run."""
    fields = ("pk", "owner_id", "hostname", "key")
    return twin_names(Machine.objects.filter(memberships__run=run).distinct().only(*fields))
