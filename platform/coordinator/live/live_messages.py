"""The messages that the site sends to the page of a run: snapshots, deltas and machines' curves.

These models are the schema of the messages. `typescript.py` generates `frontend/src/types.ts` from
them, and a test validates what the site sends. At run time the messages are plain dicts that nobody
validates: a busy run sends one every second. A model's title is its name in TypeScript.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypeAliasType

from barnraise.protocol.enums import Activity, RunStatus
from barnraise.protocol.reports import ExchangeView, PauseView, PlanView
from coordinator.telemetry.run_state import Card, HeadTile

Point = TypeAliasType(
    "Point", Annotated[tuple[float, float], Field(description="One point of a curve: [x, y].")]
)


class LiveMessage(BaseModel):
    """Base of the messages to pages. A docstring below a field is its comment in TypeScript."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def _make_optional(model: type[BaseModel], required: frozenset[str] = frozenset()) -> None:
    """Give the model's fields a default, but for those in `required`: they may be absent then."""
    for name, field in model.model_fields.items():
        if name not in required:
            field.default = None
    model.model_rebuild(force=True)


class LiveRun(LiveMessage):
    """The values of a run as a whole."""

    model_config = ConfigDict(title="Run")

    id: str
    name: str
    status: RunStatus
    tokens: int
    """Tokens in the ledger: the median over people of what their machines have."""
    people: int
    """People who vouch for that number."""
    budget: int
    """Tokens after which the training ends."""
    rate: float
    """Tokens per second over all machines that report, bounded by what other people saw."""
    started: float | None
    """Seconds since 1970; null until the training starts."""
    ended: float | None
    """Seconds since 1970; null until the run is finished or cancelled."""
    updates: int
    """Updates that all machines have published."""
    workers_known: int
    """Machines that have trained, or that are here to train."""
    people_known: int
    """The people whose machines these are."""
    workers_alive: int
    """Those of them that report."""
    training_loss: float | None
    """Nats per token over the last section of the curve, a median over people; null before any."""
    validation_loss: float | None
    """The last one, in nats per token, a median over people; null before the first."""
    score: float | None
    """The share of the run's tasks that its last weights answered; null before an evaluation."""
    confirmed_by: int
    """People who confirm the final weights; 0 until they are confirmed."""
    tiles: list[HeadTile]
    """The figures in the page's head, in their order."""
    cards: list[Card]
    """The parts of the page below its head."""
    notice: str
    """A sentence about how the run stands."""
    is_live: bool
    """Whether figures can still change."""
    agree: bool | None
    """Whether machines with the same updates have the same weights; null if unknown."""
    waiting: str | None
    """A sentence about what the run waits for; null if it waits for nothing."""
    event_count: int
    """Events in all; the newest of them are sent."""
    delayed_since: float | None
    """Seconds since 1970 since when the site's figures are delayed; null if they are current."""


class LiveRunChanges(LiveRun):
    """Those values of a run that changed; the others are absent."""

    model_config = ConfigDict(title="RunChanges")


_make_optional(LiveRunChanges)


class LiveCrewSeat(LiveMessage):
    """One machine of a crew, and the blocks that it holds."""

    model_config = ConfigDict(title="CrewSeat")

    name: str
    first_block: int
    blocks: int
    share: float
    """Of the crew's FLOPs, from 0 to 1."""
    connected: bool
    """Whether its lead reaches it."""


class LiveMachine(LiveMessage):
    """One machine of a run: a row of the table on the run's page."""

    model_config = ConfigDict(title="Machine")

    id: str
    name: str
    person: str
    """The name of its owner."""
    activity: Activity
    alive: bool
    """Whether it reports."""
    last_seen: float
    """Seconds since 1970."""
    version: str
    tokens: int
    """Tokens that this machine has published."""
    rate: float
    """Tokens per second; 0 if it does not report."""
    step: int
    step_seconds: float | None
    """Measured duration of one step; null until one was measured."""
    updates_sent: int
    updates_received: int
    peers: int
    """Peers that it is connected to."""
    exchange: ExchangeView | None
    """How it exchanges updates; null until it has published one."""
    agrees: bool | None
    """Whether its weights are those of most machines with the same updates; null if unknown."""
    pause: PauseView | None
    """Why it takes no steps; null while it does, and from machines of older versions."""
    crew: list[LiveCrewSeat]
    """The crew that it leads, itself first; empty if it leads none."""


class ExchangeChanges(ExchangeView):
    """Those figures of a machine's exchange that changed; the others are absent."""


class LiveMachineChanges(LiveMachine):
    """Those fields of a machine that changed; the others are absent."""

    model_config = ConfigDict(title="MachineChanges")

    exchange: ExchangeChanges | None
    """Those figures that changed, all if there were none before; null if there are none now."""


_make_optional(ExchangeChanges)
_make_optional(LiveMachineChanges, required=frozenset({"id"}))


class LiveEvent(LiveMessage):
    """Something that happened in a run: "who what". Both are plain text that others wrote."""

    model_config = ConfigDict(title="RunEvent")

    id: str
    at: float
    """Seconds since 1970."""
    kind: Literal["run", "machine", "weights", "checkpoint"]
    who: str
    what: str


class WorkerCurve(LiveMessage):
    """The training losses and the speed that one machine measured."""

    id: str
    name: str
    points: list[Point]
    """[tokens, nats per token], ascending."""
    rates: list[Point]
    """[seconds since 1970, tokens per second], ascending."""


class WorkerCurvesMessage(LiveMessage):
    """The curves of those machines that trained most, these first."""

    model_config = ConfigDict(title="WorkerCurves")

    machines: list[WorkerCurve]


class SwarmNode(LiveMessage):
    """A machine that reports, in the graph of the swarm."""

    id: str
    name: str
    person: str
    rate: float
    """Tokens per second."""
    agrees: bool | None


class SwarmLink(LiveMessage):
    """A connection between two machines. Rates are bytes per second now."""

    source: str
    target: str
    forward: float
    """From source to target."""
    backward: float
    agrees: bool | None
    """Whether both have the same weights; null before they were compared."""
    relayed: bool | None
    """Whether a relay server is in between; null if unknown."""


class SwarmMessage(LiveMessage):
    """The machines of a run and their connections, the oldest machines first."""

    model_config = ConfigDict(title="Swarm")

    nodes: list[SwarmNode]
    links: list[SwarmLink]
    hidden: int
    """Machines that report and are left out."""


class SnapshotMessage(LiveMessage):
    """Everything that the page shows of a run. It includes all deltas up to its number."""

    model_config = ConfigDict(title="Snapshot")

    type: Literal["snapshot"]
    seq: int
    """The number of the last delta that it includes."""
    mirror: str
    """The name of the mirror that sent it."""
    now: float
    """The mirror's clock, in seconds since 1970."""
    run: LiveRun
    workers: list[LiveMachine]
    plans: dict[str, PlanView]
    """By the machine's id."""
    events: list[LiveEvent]
    """The newest first."""
    train: list[Point]
    """[tokens, nats per token], ascending."""
    validation: list[Point]
    """[tokens, nats per token], ascending."""
    clock: list[Point]
    """[tokens, seconds since 1970], ascending: when the training reached so many tokens."""
    learning_rate: list[Point]
    """[tokens, learning rate], ascending."""
    gradient_norm: list[Point]
    """[tokens, L2 norm before clipping], ascending."""
    rate: list[Point]
    """[seconds since 1970, tokens per second], ascending."""
    machines: list[Point]
    """[seconds since 1970, machines that report], ascending."""
    sent: list[Point]
    """[seconds since 1970, bytes per second between machines], ascending."""
    received: list[Point]
    """[seconds since 1970, bytes per second between machines], ascending."""
    staleness: list[Point]
    """[seconds since 1970, updates that a machine's peers have and it lacks: the mean]."""


class DeltaMessage(LiveMessage):
    """What changed since the delta before it. A field without changes is absent."""

    model_config = ConfigDict(title="Delta")

    type: Literal["delta"]
    seq: int
    """The delta's number: one more than the previous one's, unless watchers may miss something."""
    now: float
    """The mirror's clock, in seconds since 1970."""
    run: LiveRunChanges = LiveRunChanges.model_construct()
    workers: list[LiveMachine] = []
    """Whole rows of machines that were not shown before."""
    worker_changes: list[LiveMachineChanges] = []
    """The fields that changed of machines that were shown before."""
    removed_workers: list[str] = []
    """The ids of machines that are no longer shown."""
    plans: dict[str, PlanView] = {}
    """New and changed plans, by the machine's id."""
    events: list[LiveEvent] = []
    """New events, the newest first."""
    train: list[Point] = []
    validation: list[Point] = []
    clock: list[Point] = []
    learning_rate: list[Point] = []
    gradient_norm: list[Point] = []
    rate: list[Point] = []
    machines: list[Point] = []
    sent: list[Point] = []
    received: list[Point] = []
    staleness: list[Point] = []


MESSAGES: tuple[type[LiveMessage], ...] = (
    SnapshotMessage,
    DeltaMessage,
    WorkerCurvesMessage,
    SwarmMessage,
)
