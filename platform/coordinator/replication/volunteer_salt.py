"""Share one salt among mirrors: the aggregate type "salt", for volunteers' pseudonyms in tickets.

Whichever mirror signs a ticket, a person's machines count as one volunteer's, and no peer can tell
whose. The salt itself is private data: encrypted between mirrors, and in no log. A site uses its
own until the shared one arrives. Tickets that another salt signed remain valid and are replaced
within half a day.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

from blake3 import blake3
from pydantic import Field

from barnraise.protocol.types import Digest, Message
from coordinator.eventlog import private_data
from coordinator.eventlog.projection import current_state
from coordinator.eventlog.registry import AggregateType, EventDraft, Fact, State
from coordinator.eventlog.writer import is_restore_pending, log_transaction, record
from coordinator.lib import site_identity
from coordinator.replication.models import MirrorListVersion

P = TypeVar("P", bound=Hashable)

SALT_NAME = "volunteers"
SALT_AGGREGATE = f"salt:{SALT_NAME}"


class SaltCreated(Message):
    """Record that a salt exists; the digest is that of its private data."""

    content_digest: Digest


class VolunteerSalt(Message):
    """Hold the salt, as private data."""

    salt: str = Field(pattern=r"^[0-9a-f]{64}$")


def fold(facts: Sequence[Fact]) -> State | None:
    """Choose the first salt if two mirrors created one: it is likelier to be in tickets already."""
    return {"content_digest": facts[0].payload.content_digest}


def store(name: str, state: State | None) -> None:
    """Write nothing: `volunteer_pseudonym` reads the log's state."""


def private_digests(state: State) -> list[str]:
    """Return the digest of the salt."""
    return [state["content_digest"]]


def existing_events() -> Iterable[EventDraft]:
    """Yield the creation of this site's salt as the shared one, if the site has a mirror list."""
    if MirrorListVersion.objects.exists():
        salt = site_identity.volunteer_salt().hex()
        content_digest = private_data.store(SALT_AGGREGATE, {"salt": salt})
        yield "salt.create", SALT_NAME, {"content_digest": content_digest}


def ensure_salt() -> None:
    """Record this site's salt as the shared one, unless the log names one already."""
    if is_restore_pending():
        return
    with log_transaction():
        if current_state(SALT_AGGREGATE) is None:
            for event_type, name, payload in existing_events():
                record(event_type, name, payload)


def volunteer_pseudonym(person: Hashable) -> str:
    """Return 64 hex digits that identify a person to peers without naming them."""
    return volunteer_pseudonyms([person])[person]


def volunteer_pseudonyms(people: Iterable[P]) -> dict[P, str]:
    """Return `volunteer_pseudonym` of each of these people, by one look at the salt."""
    state = current_state(SALT_AGGREGATE)
    shared = private_data.load(state["content_digest"], VolunteerSalt) if state else None
    key = bytes.fromhex(shared["salt"]) if shared else site_identity.volunteer_salt()
    return {person: blake3(str(person).encode(), key=key).hexdigest() for person in people}


AGGREGATE_TYPE = AggregateType(
    "salt",
    {"create": SaltCreated},
    fold,
    store,
    private_digests=private_digests,
    existing_events=existing_events,
)
