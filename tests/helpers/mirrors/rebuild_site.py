"""Rebuild this site from its log: empty the tables and ingest the events as a new mirror does."""

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
from coordinator.runs.models import PublishedText, Run
from coordinator.telemetry.models import Checkpoint, CheckpointHolder, RecordedScore

# Fields that each site stores for itself and does not replicate.
LOCAL_FIELDS = {
    User: {"is_staff", "is_superuser", "last_login", "ban_reason"},
    Machine: {"last_seen", "revoked_reason", "confirmed"},
    Run: {"ledger_tokens", "ledger_people", "notes"},
    CheckpointHolder: {"id", "published"},
    Checkpoint: {"published"},
    Credit: {"id", "author_header", "witness_signature"},
    RecordedScore: {"id"},
    EmailAddress: {"id"},
    Authenticator: {"id", "last_used_at"},
}
SORT_FIELDS = (
    "id",
    "user_id",
    "email",
    "type",
    "checkpoint_id",
    "machine_id",
    "incarnation",
    "day",
)
REPLICATED_MODELS = (
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
    PublishedText,
    RecordedScore,
)
LOG = (ForkProof, LogEvent, Origin, Aggregate, UniquenessClaim, PrivateData, LogState, PeerClock)


def replicated_rows() -> dict[str, list[dict]]:
    """Return the replicated fields of all replicated rows, by model name."""
    rows_by_model = {}
    for model in REPLICATED_MODELS:
        local = LOCAL_FIELDS.get(model, ())
        names = [field.attname for field in model._meta.concrete_fields if field.name not in local]
        rows_by_model[model.__name__] = sorted(
            model.objects.values(*names),
            key=lambda row: [str(row[name]) for name in names if name in SORT_FIELDS],
        )
    for person in rows_by_model["User"]:
        # An unusable password is "!" and random characters.
        if person["password"].startswith("!"):
            person["password"] = "!"
    return rows_by_model


def all_events() -> list[Signed]:
    """Return every event that this site stores, each log in order."""
    return [
        event
        for origin in Origin.objects.order_by("pk")
        for event in writer.read_events(origin.pk, 0)
    ]


def all_private_data() -> list[private_data.PrivateRecord]:
    """Return all private data that this site stores."""
    return private_data.export(list(PrivateData.objects.values_list("pk", flat=True)))


def empty_tables() -> None:
    """Delete all replicated rows and the whole log."""
    for model in (Run, Team, Machine, User, *LOG):
        model.objects.all().delete()


def rebuild_in_one_batch(
    events: Iterable[Signed], private_records: list[private_data.PrivateRecord]
) -> tuple[dict, str]:
    """Rebuild as a new mirror does, which writes all rows together after the last event.

    Returns:
        The replicated rows and the state hash.
    """
    empty_tables()
    result = ingest.ingest_events(list(events), defer=True)
    assert not result.rejected, result.rejected
    ingest.project_pending(defer=True)
    private_data.ingest(private_records, defer=True)
    ingest.project_pending()
    return replicated_rows(), projection.state_hash()


def rebuild_in_random_order(
    events: Iterable[Signed], private_records: list[private_data.PrivateRecord], seed: int = 0
) -> tuple[dict, str]:
    """Rebuild from logs that are interleaved at random, a few events at a time.

    Returns:
        The replicated rows and the state hash.
    """
    empty_tables()
    random = Random(seed)
    by_origin = defaultdict(list)
    for event in events:
        by_origin[open_event(event).origin].append(event)
    while by_origin:
        origin = random.choice(sorted(by_origin))
        count = random.randint(1, 4)
        result = ingest.ingest_events(by_origin[origin][:count])
        assert not result.rejected, result.rejected
        by_origin[origin] = by_origin[origin][count:]
        if not by_origin[origin]:
            del by_origin[origin]
        if random.random() < 0.5:
            private_data.ingest(private_records)
    private_data.ingest(private_records)
    return replicated_rows(), projection.state_hash()
