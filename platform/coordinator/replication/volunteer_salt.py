"""The kind "salt": what tickets tell people apart by, one for all mirrors of the list. Whichever mirror signs, a
person's machines count as one volunteer's, and no peer can tell whose.

The salt itself is particulars: sealed between mirrors, in no log. Until it has come a site goes by its own; tickets
that were signed by another one stay good, and are replaced within half a day."""

from collections.abc import Iterable, Sequence

from blake3 import blake3
from pydantic import Field

from barnraise.protocol.types import Digest, Message
from coordinator.eventlog import private_data
from coordinator.eventlog.projection import current
from coordinator.eventlog.registry import Fact, Kind, State, Told
from coordinator.eventlog.writer import change, held, record
from coordinator.lib import site_identity
from coordinator.replication.models import List

WHICH = "volunteers"


class Give(Message):
    about: Digest


class Salt(Message):
    """Particulars."""

    salt: str = Field(pattern=r"^[0-9a-f]{64}$")


def fold(facts: Sequence[Fact]) -> State | None:
    """The first that was given, if two mirrors gave one: it is the likelier to be in tickets already."""
    return {"about": facts[0].said.about}


def store(which: str, state: State | None) -> None:
    """Who signs a ticket asks."""


def needs(state: State) -> list[str]:
    return [state["about"]]


def existing() -> Iterable[Told]:
    if List.objects.exists():
        yield (
            "salt.give",
            WHICH,
            {"about": private_data.keep(f"salt:{WHICH}", {"salt": site_identity.salt().hex()})},
        )


def give() -> None:
    """Ours, where the log names none yet."""
    if held():
        return
    with change():
        if current(f"salt:{WHICH}") is None:
            for type, which, said in existing():
                record(type, which, said)


def volunteer(person: object) -> str:
    """64 hex digits that tell people apart to peers, and name nobody to who lacks the mirrors' secret."""
    state = current(f"salt:{WHICH}")
    told = private_data.look(state["about"], Salt) if state else None
    return blake3(
        str(person).encode(), key=bytes.fromhex(told["salt"]) if told else site_identity.salt()
    ).hexdigest()


KIND = Kind("salt", {"give": Give}, fold, store, needs=needs, existing=existing)
