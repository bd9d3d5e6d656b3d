"""The aggregate type "machine", by key: its owner, and whether it was revoked.

Its name and hardware are private data, which is deleted with the owner's account.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from uuid import UUID

from django.db.models import Q
from pydantic import AwareDatetime, Field

from barnraise.protocol.types import Count, Digest, Id, Message, PlainText
from coordinator.accounts.machines import BLANK_DESCRIPTION
from coordinator.accounts.models import Machine, User
from coordinator.eventlog import private_data
from coordinator.eventlog.registry import AggregateType, EventDraft, Fact, State, require_row
from coordinator.lib import site_identity
from coordinator.lib.bulk_upsert import bulk_upsert
from coordinator.replication import mirror_list


class MachineEnrolled(Message):
    """The owner approved the machine."""

    content_digest: Digest
    id: Id
    owner: Id
    enrolled: AwareDatetime


class MachineContent(Message):
    """Private data: what the machine is called, and its hardware."""

    hostname: PlainText = Field(max_length=100)
    system: PlainText = Field(max_length=100)
    processor: PlainText = Field(max_length=100)
    cores: int = Field(ge=0, lt=1 << 31)
    memory_bytes: Count
    accelerator: PlainText = Field(max_length=100)


class MachineDescribed(Message):
    """The machine has another name or hardware.

    The digest is that of the private data; None once the owner's account is deleted.
    """

    content_digest: Digest | None


class MachineRevoked(Message):
    """The key was revoked."""

    at: AwareDatetime


class MachineReinstated(Message):
    """The mirror that revoked the key accepts it again."""


def fold(facts: Sequence[Fact]) -> State | None:
    """Merge the events of a key.

    A key that was enrolled at two mirrors at once belongs to the person of the lowest (hlc, id),
    because its signatures cannot be two people's. A revocation binds the mirror that decided it,
    which issues no more tickets until it reinstates the key, and all mirrors once half of them
    agree. No mirror ends another one's revocation.
    """
    enrolled = [fact.payload for fact in facts if fact.action == "enrol"]
    if not enrolled:
        return None
    revoked: dict[str, str] = {}
    for fact in facts:
        if fact.action == "revoke":
            revoked.setdefault(fact.mirror, fact.payload.at.isoformat())
        elif fact.action == "reinstate":
            revoked.pop(fact.mirror, None)
    first = enrolled[0]
    described = [fact.payload for fact in facts if fact.action == "describe"]
    return {
        "id": first.id,
        "owner": first.owner,
        "enrolled": first.enrolled.isoformat(),
        "revoked": revoked,
        "content_digest": [first, *described][-1].content_digest,
    }


def private_digests(state: State) -> list[str]:
    """Name the private data of name and hardware."""
    return [state["content_digest"]] if state["content_digest"] else []


def store(key: str, state: State | None) -> None:
    """Write the machine's row.

    A key without an event is refused like a revoked one; its row stays because other rows refer to
    it.
    """
    machines = Machine.objects.filter(key=key)
    if state is None:
        machines.filter(revoked=None).update(revoked=datetime.fromtimestamp(0).astimezone())
        return
    require_row(User.objects.filter(pk=state["owner"]), f"person:{state['owner']}")
    fields = _row_fields(state, private_data.load(state["content_digest"], MachineContent))
    machine = machines.first()
    if machine and str(machine.pk) != state["id"]:
        machine = _change_id(machine, state["id"])
    if not machines.update(**fields):
        Machine.objects.bulk_create([Machine(id=state["id"], key=key, **fields)])


def _row_fields(state: State, content: dict | None) -> dict:
    revoked = None
    if state["revoked"] and mirror_list.binds_this_site(state["revoked"]):
        own_key = site_identity.identity().key
        decided = state["revoked"].get(own_key) or min(state["revoked"].values())
        revoked = datetime.fromisoformat(decided)
    fields = {
        "owner_id": state["owner"],
        "enrolled": datetime.fromisoformat(state["enrolled"]),
        "revoked": revoked,
    }
    return fields | ((content or {}) if state["content_digest"] else BLANK_DESCRIPTION)


def store_batch(states: dict[str, State]) -> set[str]:
    """Write, all at once, machines whose owner has a row and that are new or keep their id.

    A machine that has a row, and whose private data this site has not received, keeps its name.
    """
    contents = private_data.load_many(
        [state["content_digest"] for state in states.values() if state["content_digest"]],
        MachineContent,
    )
    owners = User.objects.filter(pk__in={state["owner"] for state in states.values()})
    people = set(map(str, owners.values_list("pk", flat=True)))
    ids = Counter(state["id"] for state in states.values())
    there = Machine.objects.filter(Q(key__in=states) | Q(pk__in=ids)).values_list("key", "pk")
    numbers = {key: str(pk) for key, pk in there}
    keys = {number: key for key, number in numbers.items()}
    rows = {}
    for key, state in states.items():
        number, content = state["id"], contents.get(state["content_digest"] or "")
        if state["owner"] not in people or ids[number] > 1 or keys.get(number, key) != key:
            continue
        if key not in numbers or (
            numbers[key] == number and (content or not state["content_digest"])
        ):
            rows[key] = Machine(id=number, key=key, **_row_fields(state, content))
    updated_fields = ["owner_id", "enrolled", "revoked", *BLANK_DESCRIPTION]
    bulk_upsert(list(rows.values()), update=updated_fields)
    return set(rows)


def _change_id(machine: Machine, pk: str) -> Machine:
    """Change the id of a row, and move everything that refers to it.

    The machine enrolled at two mirrors at once, and the other mirror's event won.
    """
    before, key = machine.pk, machine.key
    Machine.objects.filter(pk=before).update(key=f"was {before}")
    machine.pk = UUID(pk)
    Machine.objects.bulk_create([machine])
    for relation in Machine._meta.related_objects:
        field = relation.field.name
        relation.related_model._base_manager.filter(**{field: before}).update(**{field: machine.pk})
    Machine.objects.filter(pk=before).delete()
    return Machine.objects.get(key=key)


def existing_events() -> Iterable[EventDraft]:
    """Describe the rows of a site that is older than its log."""
    for machine in Machine.objects.all().iterator():
        yield "machine.enrol", machine.key, machine.event_payload()
        if machine.revoked:
            yield "machine.revoke", machine.key, {"at": machine.revoked}


PAYLOAD_TYPES = {
    "enrol": MachineEnrolled,
    "describe": MachineDescribed,
    "revoke": MachineRevoked,
    "reinstate": MachineReinstated,
}
AGGREGATE_TYPE = AggregateType(
    "machine",
    PAYLOAD_TYPES,
    fold,
    store,
    private_digests=private_digests,
    existing_events=existing_events,
    store_batch=store_batch,
)
