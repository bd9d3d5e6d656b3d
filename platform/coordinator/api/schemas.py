"""Request and response schemas of scripts: every field bounded, with an example.

The messages of workers are in `barnraise.protocol.coordinator_messages`.
"""

from datetime import date, datetime
from typing import Annotated, Any, Literal, TypeVar
from uuid import UUID

from ninja import Field, Schema

from barnraise.protocol.messages import Signed
from barnraise.protocol.types import PlainText
from barnraise.spec import PRESETS
from coordinator.runs.drafts import NewRun

Text = Annotated[str, Field(max_length=200)]
Number = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,14}$")]  # of an update, as a JSON key
RUN_ID = "0192f0c1-2d3e-7f40-8a5b-6c7d8e9f0a1b"
MACHINE_ID = "0192f0c1-4d3e-7f40-8a5b-6c7d8e9f0a1c"
LATER = "0192f0c0-9a3e-7f40-8a5b-6c7d8e9f0a1d"


Response = TypeVar("Response", bound=Schema)


def describe(schema: type[Response], row: object, **others: Any) -> Response:
    """Build a response from a row.

    Args:
        schema: its schema.
        row: has the fields that `others` does not have.
        others: fields that the row lacks or has under another name.
    """
    names = schema.model_fields.keys() - others.keys()
    return schema(**{name: getattr(row, name) for name in names}, **others)


def example(**fields: Any) -> Any:
    """Return a model configuration with an example for the documentation."""
    return {"json_schema_extra": {"examples": [fields]}}


class TermsIn(Schema):
    """Who can join a run, the minimum hardware and the notes; fields left out keep their value."""

    access: Literal["anyone", "invitation"] | None = None
    visibility: Literal["public", "unlisted", "invited"] | None = Field(
        None, description="Who can see the run; invited: only people whose machines can join"
    )
    min_memory: int | None = Field(
        None, ge=0, lt=1 << 50, description="Bytes of RAM a machine must have"
    )
    min_device_memory: int | None = Field(
        None, ge=0, lt=1 << 50, description="Bytes of GPU memory a machine must have"
    )
    notes: str | None = Field(
        None, max_length=20_000, description="Markdown, shown on the run's page"
    )

    model_config = example(access="invitation", min_memory=8_000_000_000)


class RunIn(Schema):
    """A run to create."""

    name: str = Field(min_length=1, max_length=80)
    preset: str = Field("gpt-nano", description=f"One of {', '.join(PRESETS)}", max_length=40)
    fields: dict[Annotated[str, Field(max_length=60)], str | int | float | list[Text]] = Field(
        {},
        description="Fields of the spec by dotted name; other fields keep the preset's value",
    )
    terms: TermsIn = Field(default_factory=lambda: TermsIn.model_validate({}))
    quorum: int = Field(
        1, ge=1, le=10_000, description="Machines to wait for before training starts"
    )
    report_every: float = Field(
        NewRun.report_every, ge=0.2, le=3600, description="Seconds between a machine's reports"
    )
    launch: bool = False

    model_config = example(
        name="Tiny stories",
        preset="gpt2-124m",
        fields={
            "recipe.token_budget": 1_000_000_000,
            "text.source": "huggingface",
            "text.places": ["owner/stories"],
        },
        terms={"access": "anyone", "min_memory": 8_000_000_000},
        launch=True,
    )


class CloneIn(Schema):
    """A run to create as a copy of another."""

    name: str = Field("", max_length=80, description="Name of the copy")
    checkpoint: str = Field(
        "",
        pattern=r"^([0-9a-f]{64})?$",
        description="Digest of the checkpoint to start from; empty: random weights",
    )

    model_config = example(name="Tiny stories, slower")


class RunOut(Schema):
    """A run with its configuration and its progress."""

    id: UUID
    slug: str
    name: str
    owner: str
    status: str
    launch_requested: bool
    parameters: int
    tokens: int = Field(description="In the run's ledger, the median over people")
    people: int = Field(description="People who vouch for that number")
    training_loss: float | None = Field(description="Nats per token, as on the run's page")
    validation_loss: float | None = Field(description="The last one, as on the run's page")
    token_budget: int
    report_every: float = Field(
        description="Seconds between a machine's reports, which a busy site lengthens to 60 s"
    )
    machines_per_host: int = Field(
        description="That a host like the one that answers bears with its web processes"
    )
    access: str
    visibility: str
    min_memory: int
    min_device_memory: int
    notes: str
    archived: datetime | None
    created: datetime
    launched: datetime | None
    started: datetime | None
    finished: datetime | None
    url: str
    spec: dict[str, Any]

    model_config = example(
        id=RUN_ID,
        slug="tiny-stories",
        name="Tiny stories",
        owner="Ada",
        status="training",
        launch_requested=True,
        parameters=124_439_808,
        tokens=61_440,
        people=3,
        training_loss=3.066,
        validation_loss=3.214,
        token_budget=1_000_000_000,
        report_every=5.0,
        machines_per_host=2_000,
        access="anyone",
        visibility="public",
        min_memory=8_000_000_000,
        min_device_memory=0,
        notes="",
        archived=None,
        created="2026-11-21T20:00:00Z",
        launched="2026-11-21T20:05:00Z",
        started="2026-11-21T20:06:00Z",
        finished=None,
        url="https://barn.example.org/runs/tiny-stories/",
        spec={"model": {"layers": 12}},
    )


class MemberOut(Schema):
    """A machine in a run, as everybody who sees the run can see it."""

    id: UUID
    key: str
    name: str
    person: str
    activity: str
    alive: bool
    last_seen: datetime
    tokens: int
    rate: float = Field(description="Tokens per second")
    step: int
    updates_sent: int
    updates_received: int

    model_config = example(
        id=MACHINE_ID,
        key="5b" * 32,
        name="attic-pc",
        person="Ada",
        activity="training",
        alive=True,
        last_seen="2026-11-21T20:10:00Z",
        tokens=20_480,
        rate=5120.5,
        step=20,
        updates_sent=2,
        updates_received=4,
    )


class MemberPage(Schema):
    """A page of the machines in a run."""

    items: list[MemberOut]
    next: UUID | None = Field(
        description="Pass it as `after` to get the next page; null on the last page"
    )

    model_config = example(items=[], next=LATER)


# Not a tuple: tools that read the API's document misread `prefixItems`.
CurvePoint = Annotated[list[float], Field(min_length=2, max_length=2)]


class HistoryOut(Schema):
    """The curves of a run."""

    curves: dict[str, list[CurvePoint]] = Field(
        description='Name → (x, y). Over tokens of all machines: "train" and "validation" (nats a '
        'token), "learning_rate", "gradient_norm", "clock" (when the training losses were '
        'measured). Over seconds since 1970: "rate" (tokens/s), "machines", "sent" and "received" '
        '(bytes/s), "staleness" (updates)'
    )

    model_config = example(curves={"train": [[20_480, 3.21]], "rate": [[1_795_000_000, 5120.5]]})


class CheckpointOut(Schema):
    """Weights that machines of a run reported."""

    id: UUID
    tokens: int
    vector: str
    digest: str = Field(description="BLAKE3 of the weights as little-endian int32")
    checksum: str
    size: int = Field(description="Bytes")
    machines: int = Field(description="Machines that reported these weights")
    machines_online: int = Field(description="Those of them that report now")
    people: int
    confirmed: bool = Field(
        description="Two people report this digest, and more than half of those who report weights "
        "of the same updates"
    )
    disputed: bool = Field(description="Two people report other weights of the same updates")

    model_config = example(
        id=LATER,
        tokens=61_440,
        vector="0" * 63 + "a",
        digest="0" * 63 + "b",
        checksum="0123456789abcdef",
        size=497_759_232,
        machines=3,
        machines_online=2,
        people=2,
        confirmed=True,
        disputed=False,
    )


class VerdictIn(Schema):
    """Updates of one machine to remove, or a volunteer to exclude or to clear."""

    author: Text = Field(
        "", description="A machine's name, id or key; KEY.INCARNATION for an earlier numbering"
    )
    exclude: Text = Field(
        "",
        description="A machine of a volunteer, by name, id or key: exclude the volunteer with all "
        "machines",
    )
    clear: Text = Field(
        "",
        description="A machine of a suspended volunteer: its volunteer's updates count again",
    )
    keep_updates: bool = Field(
        False, description="Keep what an excluded volunteer has published so far"
    )
    first: int | None = Field(
        None, ge=1, lt=1 << 53, description="Remove all updates from this number on"
    )
    updates: dict[Number, Annotated[int, Field(ge=0, lt=1 << 53)]] = Field(
        {},
        max_length=200,
        description="Single updates, each with its tokens; 0 leaves the run's count as it is",
    )
    reason: PlainText = Field("", max_length=100, description="Public")

    model_config = example(author="attic-pc", first=17, reason="noise")


class VerdictOut(Schema):
    """A verdict with its signatures."""

    id: UUID
    digest: str = Field(
        description="BLAKE3 of `body`, by which machines confirm that they applied it"
    )
    body: str = Field(description="The exact text that was signed: a Verdict")
    signatures: dict[str, str] = Field(description="Signatures by the mirror's key")
    given: datetime
    proven: bool = Field(
        description="Whether as many mirrors have signed as the run's spec demands"
    )

    model_config = example(
        id=LATER,
        digest="0" * 63 + "c",
        signatures={"0" * 63 + "1": "0" * 127 + "2"},
        given="2026-11-21T20:00:00Z",
        body='{"run":"0192f0c1-2d3e-7f40-8a5b-6c7d8e9f0a1b","after":{},"updates":{},"reason":"noise","issued":1.0}',
        proven=True,
    )


class CreditOut(Schema):
    """A range of a machine's updates that another person's machine has applied."""

    id: UUID
    run: UUID
    peer: str = Field(description="The author's key")
    incarnation: str
    first: int
    last: int
    tokens: int
    day: date
    head: Signed | None = Field(
        description='The author\'s signed header of the last update (kind "update")'
    )
    witness: Signed | None = Field(
        description='Another machine\'s signed statement that it applied it (kind "attestation")'
    )

    model_config = example(
        id="0192f0c1-2d3e-7f40-8a5b-6c7d8e9f0a1b",
        run="0192f0c1-2d3e-7f40-8a5b-6c7d8e9f0a1c",
        peer="5f" * 32,
        incarnation="0123456789abcdef",
        first=1,
        last=12,
        tokens=491_520,
        day="2026-11-21",
        head=None,
        witness=None,
    )


class CreditPage(Schema):
    """A page of credit."""

    items: list[CreditOut]
    next: UUID | None = Field(
        description="Pass it as `after` to get the next page; null on the last page"
    )

    model_config = example(items=[], next=None)


class InvitationIn(Schema):
    """An invitation link to create."""

    note: PlainText = Field("", max_length=80, description="Who the link is for; only you see it")

    model_config = example(note="the chess club")


class InvitationOut(Schema):
    """An invitation link."""

    id: UUID
    note: str
    url: str
    expires: datetime
    guests: int = Field(description="People who accepted it")

    model_config = example(
        id=LATER,
        note="the chess club",
        url="https://barn.example.org/runs/tiny-stories/invited/…/",
        expires="2026-12-21T20:00:00Z",
        guests=0,
    )


class MachineIn(Schema):
    """A machine's new name."""

    name: str = Field(max_length=60)

    model_config = example(name="attic-pc")


class MachineOut(Schema):
    """A machine, as its owner sees it."""

    id: UUID
    key: str
    name: str
    system: str
    cores: int
    memory_bytes: int
    accelerator: str
    paused: bool
    revoked: bool
    enrolled: datetime
    last_seen: datetime | None
    hardware: dict[str, Any] | None = Field(description="Measured by the machine: a HardwareView")

    model_config = example(
        id=MACHINE_ID,
        key="0" * 63 + "1",
        name="attic-pc",
        system="Linux",
        cores=8,
        memory_bytes=34_359_738_368,
        accelerator="",
        paused=False,
        revoked=False,
        enrolled="2026-11-20T08:00:00Z",
        last_seen=None,
        hardware=None,
    )


class MachinePage(Schema):
    """A page of machines."""

    items: list[MachineOut]
    next: UUID | None = Field(
        description="Pass it as `after` to get the next page; null on the last page"
    )

    model_config = example(items=[], next=None)


class EstimateIn(Schema):
    """A run to estimate."""

    preset: str = Field("gpt-nano", max_length=40)
    fields: dict[Annotated[str, Field(max_length=60)], str | int | float | list[Text]] = {}
    volunteers: int = Field(10, ge=1, le=10_000)

    model_config = example(
        preset="gpt2-124m", fields={"recipe.token_budget": 1_000_000_000}, volunteers=25
    )


class PaceOut(Schema):
    """The duration of a run on one kind of line."""

    uplink_megabits: float = Field(description="Uplink of each machine in Mb/s")
    downlink_megabits: float = Field(description="Downlink of each machine in Mb/s")
    strategy: str = Field(description="Exchange strategy that suits these machines and lines best")
    strategy_reason: str = Field(description="The numbers behind that, in one sentence")
    seconds: float = Field(description="Duration of the whole run with so many such machines")
    steps_per_round: int
    compression: str = Field(description="Compression of an update")
    slowdown: float = Field(description="Factor by which the uplink prolongs the run")
    rounds: float = Field(description="How often each machine is heard in the whole run")
    speedup: float | None = Field(
        description="How many times sooner than with one machine, at the same loss; null if unknown"
    )
    speedup_basis: str = Field(description="What that was measured on")


class NeedOut(Schema):
    """What a run needs of one kind of machine."""

    machine: str
    refusal: str = Field(description="Why the machine cannot train this; empty if it can")
    step_seconds: float
    tokens_per_second: float
    host_bytes: int
    device_bytes: int
    disk_bytes: int
    limited_by: str
    paces: list[PaceOut]


class EstimateOut(Schema):
    """The estimate of a run."""

    parameters: int
    needs: list[NeedOut]

    model_config = example(
        parameters=124_439_808,
        needs=[
            {
                "machine": "12 GB GPU",
                "refusal": "",
                "step_seconds": 0.6,
                "tokens_per_second": 13_653.0,
                "host_bytes": 3_000_000_000,
                "device_bytes": 6_000_000_000,
                "disk_bytes": 0,
                "limited_by": "compute",
                "paces": [
                    {
                        "uplink_megabits": 15,
                        "downlink_megabits": 112,
                        "strategy": "updates",
                        "strategy_reason": (
                            "Machines compute 100% of the time; that is 665 times the tokens per "
                            "second of synchronous data parallelism."
                        ),
                        "seconds": 7325.0,
                        "steps_per_round": 40,
                        "compression": "dense4",
                        "slowdown": 1,
                        "rounds": 413.0,
                        "speedup": 2.5,
                        "speedup_basis": "a model of 0.64 M parameters",
                    }
                ],
            }
        ],
    )


class Me(Schema):
    """A token and its owner."""

    id: UUID
    name: str
    token: str
    scopes: list[str]
    expires: datetime

    model_config = example(
        id=LATER, name="Ada", token="nightly", scopes=["runs:read"], expires="2027-11-21T20:00:00Z"
    )
