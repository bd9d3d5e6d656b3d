"""The kind "salt": what tickets tell people apart by, one for all mirrors of the list. Whichever mirror signs, a
person's machines count as one volunteer's, and no peer can tell whose.

The salt itself is particulars: sealed between mirrors, in no log. Until it has come a site goes by its own; tickets
that were signed by another one stay good, and are replaced within half a day."""

from collections.abc import Iterable, Sequence

from blake3 import blake3
from pydantic import Field

from barnraise.protocol.types import Digest, Message
from coordinator.eventlog import private_data
from coordinator.eventlog.projection import current_state
from coordinator.eventlog.registry import AggregateType, EventDraft, Fact, State
from coordinator.eventlog.writer import is_restore_pending, log_transaction, record
from coordinator.lib import site_identity
from coordinator.replication.models import MirrorListVersion

SALT_NAME = "volunteers"


class SaltCreated(Message):
    about: Digest


class VolunteerSalt(Message):
    """Particulars."""

    salt: str = Field(pattern=r"^[0-9a-f]{64}$")


def fold(facts: Sequence[Fact]) -> State | None:
    """The first that was given, if two mirrors gave one: it is the likelier to be in tickets already."""
    return {"about": facts[0].payload.about}


def store(which: str, state: State | None) -> None:
    """Who signs a ticket asks."""


def needs(state: State) -> list[str]:
    return [state["about"]]


def existing() -> Iterable[EventDraft]:
    if MirrorListVersion.objects.exists():
        yield (
            "salt.create",
            SALT_NAME,
            {
                "about": private_data.store(
                    f"salt:{SALT_NAME}", {"salt": site_identity.salt().hex()}
                )
            },
        )


def ensure_salt() -> None:
    """Ours, where the log names none yet."""
    if is_restore_pending():
        return
    with log_transaction():
        if current_state(f"salt:{SALT_NAME}") is None:
            for type, which, said in existing():
                record(type, which, said)


def volunteer_pseudonym(person: object) -> str:
    """64 hex digits that tell people apart to peers, and name nobody to who lacks the mirrors' secret."""
    state = current_state(f"salt:{SALT_NAME}")
    told = private_data.load(state["about"], VolunteerSalt) if state else None
    return blake3(
        str(person).encode(), key=bytes.fromhex(told["salt"]) if told else site_identity.salt()
    ).hexdigest()


AGGREGATE_TYPE = AggregateType(
    "salt", {"create": SaltCreated}, fold, store, private_digests=needs, existing_events=existing
)
