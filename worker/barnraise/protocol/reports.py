"""Reports: what a machine measures in a run, for its coordinator and the people who watch.

A `Report` has one shape on its whole way: the worker spools and sends it, the site stores it and
streams it to browsers as it is.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from barnraise.protocol.enums import Activity, PauseReason
from barnraise.protocol.messages import MAX_CREW_MEMBERS
from barnraise.protocol.rule_sizes import MAX_HOURS, MAX_PROGRAM_NAME, MAX_PROGRAMS
from barnraise.protocol.types import (
    Addresses,
    Count,
    Digest,
    Incarnation,
    Loss,
    Message,
    PlainText,
    Rate,
    SampleText,
    Seconds,
    Sketch,
    UnixTime,
    Version,
)
from barnraise.spec import MAX_PROMPTS

MAX_POINTS = 64  # measured losses in a report
SAMPLE_LENGTH = 600  # characters of a sample
MAX_LINKS = 8  # in a report: those that carry most
MAX_LOG_LINES = 5  # in a report: the newest since the last one
MAX_LOG_TEXT = 160  # characters
MAX_SUSPENDED = 2  # volunteers in a report
MAX_PAUSE_TEXT = 100  # characters

HoursText = Annotated[str, Field(pattern=r"^[0-9A-Za-z:, -]*$", max_length=MAX_HOURS)]
ProgramName = Annotated[PlainText, Field(max_length=MAX_PROGRAM_NAME)]
Share = Annotated[float, Field(ge=0, le=1)]
Celsius = Annotated[float, Field(ge=-100, le=300)]
# The first 16 digits of a peer's key, or of a volunteer's digest.
KeyStart = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$", max_length=16)]


class MeasuredLoss(Message):
    """One measured loss.

    `tokens` of a training loss are those of the ledger and those that the machine has trained since
    its last update, so that a first round is visible while it lasts. A validation loss is of the
    ledger's weights, at the ledger's tokens.
    """

    kind: Literal["train", "validation"]
    tokens: Count
    loss: Loss


class PlanView(Message):
    """How a machine has decided to train, for people to read."""

    device: PlainText = Field(max_length=80)
    device_bytes: Count  # what the plan needs of each tier
    host_bytes: Count
    disk_bytes: Count
    groups: int = Field(ge=1, le=100_000)  # of layers, in a step's forward pass
    micro_batches: int = Field(ge=1, le=1_000_000)
    micro_tokens: int = Field(ge=1, lt=1 << 53)
    layers: int = Field(ge=1, le=100_000)
    resident: int = Field(ge=0, le=100_000)  # layers whose training state stays in memory
    clipping: Literal["none", "exact", "layer"]
    crash_safety: Literal["exact", "restart", "round"]
    # The resource that limits the speed: "compute", "disk", "link" or "optimizer".
    binding: PlainText = Field(max_length=40)
    predicted_seconds: Seconds  # of one step
    disk_written_per_day: Count  # bytes
    sentence: PlainText = Field(max_length=300)  # the plan in a sentence


class ExchangeView(Message):
    """How a machine exchanges its updates, for people to read."""

    round_steps: int = Field(ge=1, le=1_000_000)  # steps of one of its rounds now
    scheme: PlainText = Field(max_length=20)  # of quantisation: "dense4", "top64x2"
    density: float = Field(gt=0, le=1)  # share of all values that an update contains
    bits_per_parameter: float = Field(gt=0, le=64)  # of an update, overhead included
    sent_rate: Rate  # bytes/s now
    received_rate: Rate  # bytes/s now
    uplink_rate: Rate  # bytes/s that its uplink was measured to carry; 0: not known yet
    lag: Count  # updates that its peers have and it lacks
    relayed: Count = 0  # of its peers: reached through a relay server
    reached: bool = False  # whether machines that it had not dialled have reached it of late
    # The starts of the digests of volunteers whose updates its run withholds.
    suspended: list[KeyStart] = Field(default=[], max_length=MAX_SUSPENDED)


class SystemView(Message):
    """How busy a machine is. Only its owner sees it. Shares are of 1; null where not measured."""

    cpu: Share | None = None  # of all cores, by all programs
    worker_cpu: Share | None = None  # of all cores, by this worker
    memory_used: Count = 0  # bytes, by all programs
    memory_total: Count = 0
    worker_memory: Count | None = None  # bytes, by this worker
    gpu: Share | None = None
    gpu_memory_used: Count | None = None
    gpu_memory_total: Count | None = None
    cpu_celsius: Celsius | None = None
    gpu_celsius: Celsius | None = None


class LimitsView(Message):
    """What a machine's owner allows the worker to use, in bytes; null: no limit of the owner's.

    The rules that say when it trains are as in `planning.limits.Limits`.
    """

    memory: Count | None = None
    device_memory: Count | None = None
    disk: Count | None = None
    disk_writes_per_day: Count | None = None
    uplink: Count | None = None  # bytes/s
    hours: HoursText = ""
    idle: int | None = Field(default=None, ge=1, le=1440)  # minutes
    on_battery: bool | None = None  # null in older versions
    busy_cpu: int | None = Field(default=None, ge=1, le=99)  # percent
    pause_for: list[ProgramName] = Field(default=[], max_length=MAX_PROGRAMS)
    threads: int | None = Field(default=None, ge=1, le=4096)
    cpu: int | None = Field(default=None, ge=1, le=100)  # percent of the time
    max_temperature: int | None = Field(default=None, ge=40, le=110)  # °C
    month_up: Count | None = None
    download: Count | None = None  # bytes/s


class PauseView(Message):
    """Why a machine takes no steps, and until when, where that is known."""

    reason: PauseReason
    until: UnixTime | None = None


class CrewSeatView(Message):
    """One machine of a crew, as its lead sees it."""

    key: KeyStart
    first_block: int = Field(ge=1, le=100_000)
    blocks: int = Field(ge=1, le=100_000)
    share: Share  # of the crew's FLOPs
    connected: bool  # to the lead


class LinkView(Message):
    """A connection to a peer."""

    peer: KeyStart
    sent_rate: Rate  # bytes/s now
    received_rate: Rate
    agrees: bool | None = None  # whether its weights are the same; null before a comparison
    relayed: bool | None = None  # whether a relay server is in between; null in older versions


class LogLine(Message):
    """A line of the worker's log. Only the machine's owner sees it."""

    at: UnixTime
    level: Literal["info", "warning", "error"]
    text: PlainText = Field(max_length=MAX_LOG_TEXT)


class CheckpointView(Message):
    """An anchor that a machine has completely on its disk.

    Machines with equal version vectors must have equal digests and checksums.
    """

    tokens: Count  # of the updates in it
    vector: Digest  # of the version vector
    digest: Digest  # BLAKE3 of the fragments
    checksum: Sketch
    size: Count  # bytes, as int32


class Sample(Message):
    """What a machine wrote after one of the run's prompts."""

    prompt: int = Field(ge=0, lt=MAX_PROMPTS)  # its index in the spec
    text: SampleText = Field(max_length=SAMPLE_LENGTH)


class SamplesView(Message):
    """Samples that a machine wrote with the shared weights, when the ledger held `tokens`."""

    tokens: Count
    texts: list[Sample] = Field(max_length=MAX_PROMPTS)


class MachineFigures(Message):
    """What describes a machine in a run at one moment.

    It is the one list of these figures: reports, the worker's status file, the site's database, its
    live table and the pages between mirrors take their fields from it. Totals count from the
    creation of the state folder.
    """

    version: Version
    activity: Activity
    incarnation: Incarnation
    step: Count
    abandoned_steps: Count = 0  # of this process: loss or gradient not finite
    tokens: Count  # total published by this machine
    ledger_tokens: Count  # total published by all machines, as far as this one knows
    rate: Rate  # tokens/s
    updates_sent: Count
    updates_received: Count
    peers: int = Field(ge=0, le=100_000)  # connected now
    peer_bytes_sent: Count
    peer_bytes_received: Count
    vector: Digest  # of the version vector; machines with equal ones can be compared
    anchor: Digest | None = None  # BLAKE3 of the anchor at that vector, where it was computed
    plan: PlanView | None = None
    step_seconds: Seconds | None = None  # measured, without exchange; a mean over about 20 steps
    exchange: ExchangeView | None = None
    learning_rate: Rate | None = None  # of the last step
    gradient_norm: Rate | None = None  # before clipping: a mean over about 20 steps
    pause: PauseView | None = None  # null while it trains, and in older versions
    # The crew that this machine leads, itself first; empty if it leads none.
    crew: list[CrewSeatView] = Field(default=[], max_length=1 + MAX_CREW_MEMBERS)

    def dump_stated(self) -> dict[str, Any]:
        """Return the figures as JSON values, without those that leave earlier ones valid.

        These are a plan that is None, with the duration of a step under it, and an exchange that is
        None.
        """
        unstated: set[str] = set() if self.plan else {"plan", "step_seconds"}
        if self.exchange is None:
            unstated.add("exchange")
        stated = MachineFigures.model_fields.keys() - unstated
        return self.model_dump(mode="json", include=stated)


# The figures of a machine that has measured nothing yet.
NO_FIGURES = MachineFigures(
    version="0",
    activity=Activity.PREPARING,
    incarnation="0" * 16,
    step=0,
    tokens=0,
    ledger_tokens=0,
    rate=0.0,
    updates_sent=0,
    updates_received=0,
    peers=0,
    peer_bytes_sent=0,
    peer_bytes_received=0,
    vector="0" * 64,
)


class Report(MachineFigures):
    """One machine's figures, and what happened since its previous report.

    The plan, the exchange and the checkpoint are in every report, so that a lost report, or a site
    that lost its state, loses nothing.
    """

    seq: int = Field(ge=1, lt=1 << 53)
    at: UnixTime
    addresses: Addresses
    points: list[MeasuredLoss] = Field(default=[], max_length=MAX_POINTS)
    checkpoint: CheckpointView | None = None  # the last one
    samples: SamplesView | None = None  # new ones only
    links: list[LinkView] = Field(default=[], max_length=MAX_LINKS)
    system: SystemView | None = None
    limits: LimitsView | None = None
    # The pause with its details, such as a program's name: only the machine's owner sees it.
    pause_sentence: PlainText = Field(default="", max_length=MAX_PAUSE_TEXT)
    log: list[LogLine] = Field(default=[], max_length=MAX_LOG_LINES)  # new ones only


# FLOP, bytes or parameters per second.
Speed = Annotated[float, Field(ge=1, lt=1e18, allow_inf_nan=False)]

# (size, the speed at it), ascending in size.
Speeds = Annotated[list[tuple[Count, Speed]], Field(max_length=32)]

Dtype = Literal["float32", "bfloat16"]


class ProductsView(Message):
    """The speed of matrix products in one dtype."""

    dtype: Dtype
    forward: Speeds
    backward: Speeds


class UpdatesView(Message):
    """The speed of AdamW in one configuration."""

    where: Literal["host", "device"]
    dtype: Dtype
    bits: Literal[8, 32]  # of a moment
    rate: Speed  # parameters/s


class HardwareView(Message):
    """What a machine can do, as it measured itself: a bounded `planning.hardware.Hardware`.

    A coordinator estimates with it what a run would take on the machine.
    """

    device: Literal["cpu", "cuda"]
    name: PlainText = Field(max_length=80)
    cores: int = Field(ge=1, le=100_000)
    memory: Count
    device_memory: Count
    disk: Count
    dtype: Dtype
    matmul: Speeds = Field(min_length=1)
    attention: Speed
    elementwise: Speed
    to_device: Speed
    from_device: Speed
    stream: Speed
    adam: Speed
    disk_read: Speed
    disk_write: Speed
    products: list[ProductsView] = Field(default=[], max_length=4)
    attention_contexts: Speeds = []
    attention_heads: Speeds = []
    attention_backward: float = Field(default=0.0, ge=0, lt=1e18, allow_inf_nan=False)
    logits: Speeds = []
    updates: list[UpdatesView] = Field(default=[], max_length=16)
    processor: PlainText = Field(default="", max_length=80)  # the CPU, also where a GPU computes
