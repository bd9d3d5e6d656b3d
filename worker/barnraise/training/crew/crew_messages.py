"""The control messages of a crew: JSON, with every field bounded.

The lead sends numbered orders, and decisions on steps; the other machines send replies. The number
grows by one with each order, and a step that is repeated is a new order. A machine executes an
order once, however often a channel that breaks makes the lead send it.
"""

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from barnraise.errors import MessageError
from barnraise.protocol.types import Count, Digest, Incarnation, Message, Sentence, Sketch
from barnraise.training.crew.forming_messages import (
    CrewApplication,
    CrewRefusal,
    PriceList,
    PriceQuery,
    Seating,
)

MAX_FRAGMENTS = 258  # of the deepest model that a spec allows
MAX_CONTROL_BYTES = 1 << 20
MAX_ATTACHMENTS = 4096  # of one message
MAX_PARTS = 256  # of a validation; the held-out text has fewer sequences

FragmentIndex = Annotated[int, Field(ge=0, lt=MAX_FRAGMENTS)]
SeatNumber = Annotated[int, Field(ge=0, le=15)]
Units = Annotated[list[FiniteFloat], Field(max_length=MAX_FRAGMENTS)]  # one for each fragment
FragmentList = Annotated[list[FragmentIndex], Field(max_length=MAX_FRAGMENTS)]
Routes = Annotated[
    list[Annotated[list[SeatNumber], Field(max_length=16)]], Field(max_length=1 << 16)
]
SchemeName = Annotated[str, Field(pattern=r"^(dense[248]|top\d{1,4}x[248])$")]
Verdict = Literal["apply", "cancel", "abandon"]
PartSize = Annotated[int, Field(ge=1, le=4096)]  # sequences
PartName = Literal["anchor", "moments", "momentum", "feedback", "replica"]  # of a fragment
MethodName = Literal["flush", "apply_queued", "reset_round", "reset_feedback", "reset_momentum"]
SAVED_PARTS: tuple[PartName, ...] = ("anchor", "moments", "momentum", "feedback")


class Attachment(Message):
    """Bytes that are sent in pieces along with a message: a fragment, or its part of an update."""

    fragment: FragmentIndex
    size: Count  # bytes
    digest: Digest
    update: Count = 0  # which of several updates it belongs to
    multiplier: Literal[-1, 1] = 1  # -1 where a retraction subtracts it


class StepTask(Message):
    """Make a step, up to the norms of its gradients."""

    kind: Literal["step"] = "step"
    rate_scale: FiniteFloat
    position: Count  # where in the data the next step begins
    routes: Routes = []  # of the micro-batches; none where each span has one holder


class QueueTask(Message):
    """Queue other authors' updates, which are attached."""

    kind: Literal["queue"] = "queue"
    updates: Count  # how many
    prediction: Units | None = None


class CallTask(Message):
    """Call a method of the engine that needs nothing but its name; see `Engine`."""

    kind: Literal["call"] = "call"
    method: MethodName


class EndRoundTask(Message):
    """End the round of some fragments; the encoded parts are attached to the reply.

    They come with the order to a machine whose span has another holder, which has encoded them.
    """

    kind: Literal["end round"] = "end round"
    fragments: FragmentList
    scheme: SchemeName
    weight: FiniteFloat
    carries_residual: bool
    has_momentum: bool
    flushes: bool  # whether the round of all fragments ends, so that a pending step belongs to it


class EvaluateTask(Message):
    """Compute the anchor's outputs for parts of the held-out text, of so many sequences each."""

    kind: Literal["evaluate"] = "evaluate"
    route: Annotated[list[SeatNumber], Field(max_length=16)]  # the machine of each span
    parts: Annotated[list[PartSize], Field(max_length=MAX_PARTS)]


class FragmentTask(Message):
    """Store the attached part of a fragment's state; without any, attach it to the reply.

    With `saved` it is that of the state that `LoadTask` has named.
    """

    kind: Literal["fragment"] = "fragment"
    fragment: FragmentIndex
    part: PartName = "anchor"
    saved: bool = False
    sketch_only: bool = False  # whether the reply states the anchor's sketch, and nothing else
    flushes: bool = False  # whether a pending step is applied before the replica is read
    forgets: bool = False  # whether all other parts of the fragment begin at zero


class SaveTask(Message):
    """Save the state on the machine's own disk under a label; with `closing` also what is last."""

    kind: Literal["save"] = "save"
    label: Count
    closing: bool


class LoadTask(Message):
    """Load what was saved under a label, as far as the machine holds it now, and begin a round.

    The reply states all fragments that the machine has saved under it; 0 labels no state.
    """

    kind: Literal["load"] = "load"
    label: Count


class ProgressTask(Message):
    """Set how far the state has come, where the lead's has changed."""

    kind: Literal["progress"] = "progress"
    position: Count
    optimizer_steps: Count | None = None  # None leaves the machine's own
    warmup_steps_left: Count | None = None


class LeaveTask(Message):
    """End: the lead leaves the run."""

    kind: Literal["leave"] = "leave"


Task = Annotated[
    StepTask
    | QueueTask
    | CallTask
    | EndRoundTask
    | EvaluateTask
    | FragmentTask
    | SaveTask
    | LoadTask
    | ProgressTask
    | LeaveTask,
    Field(discriminator="kind"),
]
Attachments = Annotated[list[Attachment], Field(max_length=MAX_ATTACHMENTS)]


class Order(Message):
    """What the lead wants a machine to do."""

    type: Literal["order"] = "order"
    epoch: Count
    number: Count
    task: Task
    attachments: Attachments = []


class StepDecision(Message):
    """Whether the step of an order counts: the lead has all norms, or the step was cancelled.

    A step whose loss or gradient is not finite is abandoned, and the round with it.
    """

    type: Literal["decision"] = "decision"
    epoch: Count
    number: Count
    verdict: Verdict
    loss: FiniteFloat = 0.0
    norm: FiniteFloat = 0.0


class Norms(Message):
    """The norms of a machine's gradients, which are complete; None for one that is not finite."""

    type: Literal["norms"] = "norms"
    epoch: Count
    number: Count
    norms: Annotated[list[FiniteFloat | None], Field(max_length=MAX_FRAGMENTS)]
    seconds: Annotated[FiniteFloat, Field(ge=0)] = 0.0  # of its own work, without waiting


class Reply(Message):
    """What a machine did with an order; `problem` is a sentence where it could not obey.

    What was interrupted, because a channel broke, the lead may order again.
    """

    type: Literal["reply"] = "reply"
    epoch: Count
    number: Count
    problem: Sentence = ""
    interrupted: bool = False
    refused: SeatNumber | None = None  # a machine whose outputs are of no use
    saved: FragmentList = []  # fragments that this machine has saved under a label
    is_stale: bool = False  # their anchor has more updates by now
    sketch: Sketch | None = None
    attachments: Attachments = []


class BrokenStep(Message):
    """A step that a machine cannot complete, because its neighbour is gone or sent what is wrong.

    `problem` is a sentence. A step that has diverged is abandoned, as on one machine.
    """

    type: Literal["broken"] = "broken"
    epoch: Count
    number: Count
    neighbour: SeatNumber
    problem: Sentence
    diverged: bool = False
    refused: bool = False  # whether the neighbour sent what is of no use


class CrewHello(Message):
    """The first message of a channel. A machine that restarts has another session."""

    type: Literal["hello"] = "hello"
    epoch: Count  # of the sender's roster
    session: Incarnation


class Recall(Message):
    """Apply for a seat again: the lead deals the blocks again, or has done so."""

    type: Literal["recall"] = "recall"


class Ping(Message):
    """A sign of life: nothing else was sent for a while."""

    type: Literal["ping"] = "ping"


StepMessage = Order | StepDecision | Norms | Reply | BrokenStep | CrewHello  # of one roster
FormingMessage = CrewApplication | CrewRefusal | PriceQuery | PriceList | Seating
ControlMessage = Annotated[
    StepMessage | FormingMessage | Recall | Ping, Field(discriminator="type")
]
_ADAPTER: TypeAdapter[ControlMessage] = TypeAdapter(ControlMessage)


def parse_control(data: bytes | memoryview) -> ControlMessage:
    """Return the message of JSON that another machine sent.

    Raises:
        MessageError: it is none.
    """
    if len(data) > MAX_CONTROL_BYTES:
        raise MessageError(f"a crew's message of {len(data):,} bytes is too long")
    try:
        return _ADAPTER.validate_json(bytes(data))
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"])) or "its text"
        raise MessageError(f"a crew's message is malformed at {where}") from None
