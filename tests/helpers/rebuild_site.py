"""A second site in the first one's place: its tables emptied, its log taken in again as another mirror would."""

from collections import defaultdict
from collections.abc import Iterable
from random import Random

from allauth.account.models import EmailAddress
from allauth.mfa.models import Authenticator

from barnraise.protocol.messages import Signed
from coordinator.accounts.models import Machine, Team, TeamMember, User
from coordinator.credit.models import Credit
from coordinator.eventlog import ingest, private_data, projection, writer
from coordinator.eventlog.event import open_event
from coordinator.eventlog.models import (
    Aggregate,
    ForkProof,
    LogEvent,
    LogState,
    Origin,
    PeerClock,
    PrivateData,
    UniquenessClaim,
)
from coordinator.fleet.models import MachinePause, VerdictRecord
from coordinator.runs.models import Run
from coordinator.telemetry.models import Checkpoint, CheckpointHolder

# What each site knows for itself, or what is nobody else's.
OWN = {
    User: {"is_superuser", "last_login", "ban_reason"},
    Machine: {"last_seen", "revoked_reason"},
    Run: {"ledger_tokens", "notes"},
    CheckpointHolder: {"id", "published"},
    Checkpoint: {"published"},
    Credit: {"id", "author_header", "witness_signature"},
    EmailAddress: {"id"},
    Authenticator: {"id", "last_used_at"},
}
ORDER = ("id", "user_id", "email", "type", "checkpoint_id", "machine_id", "incarnation", "day")
SHARED = (
    User,
    EmailAddress,
    Authenticator,
    Machine,
    Team,
    TeamMember,
    Run,
    MachinePause,
    VerdictRecord,
    Checkpoint,
    CheckpointHolder,
    Credit,
)
LOG = (ForkProof, LogEvent, Origin, Aggregate, UniquenessClaim, PrivateData, LogState, PeerClock)


def replicated_rows() -> dict[str, list[dict]]:
    """All that mirrors share, as the tables hold it."""
    told = {}
    for model in SHARED:
        names = [f.attname for f in model._meta.concrete_fields if f.name not in OWN.get(model, ())]
        known = model.objects.values(*names)
        told[model.__name__] = sorted(
            known, key=lambda row: [str(row[name]) for name in names if name in ORDER]
        )
    for person in told["User"]:
        if person["password"].startswith("!"):  # none: Django draws the rest of it
            person["password"] = "!"
    return told


def all_events() -> list[Signed]:
    """Every event held here, each log in order."""
    return [
        each
        for origin in Origin.objects.order_by("pk")
        for each in writer.read_events(origin.pk, 0)
    ]


def all_private_data() -> list[private_data.PrivateRecord]:
    return private_data.export(list(PrivateData.objects.values_list("pk", flat=True)))


def empty_tables() -> None:
    for model in (Run, Team, Machine, User, *LOG):
        model.objects.all().delete()


def rebuild_in_one_batch(
    events: Iterable[Signed], kept: list[private_data.PrivateRecord]
) -> tuple[dict, str]:
    """(rows, state hash) of a new mirror: everything comes first, and then all rows are written together."""
    empty_tables()
    told = ingest.ingest_events(list(events), defer=True)
    assert not told.rejected, told.rejected
    ingest.project_pending(defer=True)
    private_data.ingest(kept, defer=True)
    ingest.project_pending()
    return replicated_rows(), projection.state_hash()


def rebuild_in_random_order(
    events: Iterable[Signed], kept: list[private_data.PrivateRecord], seed: int = 0
) -> tuple[dict, str]:
    """(rows, state hash) of an empty site that took these in, the logs interleaved somehow."""
    empty_tables()
    chance, by_origin = Random(seed), defaultdict(list)
    for event in events:
        by_origin[open_event(event).origin].append(event)
    while by_origin:
        origin = chance.choice(sorted(by_origin))
        some = chance.randint(1, 4)
        told = ingest.ingest_events(by_origin[origin][:some])
        assert not told.rejected, told.rejected
        by_origin[origin] = by_origin[origin][some:]
        if not by_origin[origin]:
            del by_origin[origin]
        if chance.random() < 0.5:
            private_data.ingest(kept)
    private_data.ingest(kept)
    return replicated_rows(), projection.state_hash()
