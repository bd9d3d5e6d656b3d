"""Training metrics: the figures behind a worker's reports, its status file and its terminal line.

`TrainingMetrics.compose_report` composes what a report contains; the reporter stores and sends it.
The status file shows the same figures, with a few that concern only this machine.
"""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from barnraise import __version__
from barnraise.exchange.stats import ExchangeStats, NeighbourView
from barnraise.ledger.anchor import Anchor
from barnraise.protocol.enums import Activity
from barnraise.protocol.reports import (
    MAX_LINKS,
    MAX_PAUSE_TEXT,
    MAX_POINTS,
    CheckpointView,
    CrewSeatView,
    LinkView,
    MeasuredLoss,
    PlanView,
    Report,
    SamplesView,
)
from barnraise.swap.engine import StepStats
from barnraise.training.limits.decision import TrainingDecision

log = logging.getLogger("barnraise")

STATUS_SECONDS = 1.0  # between two status files; writing one takes some 7 ms of the loop
REST_STATUS_SECONDS = 5.0  # the same while a pause has freed the memory and shall cost nothing
POINT_SECONDS = 2.0  # of training, whose mean loss makes one point
DIGEST_SHARE = 0.02  # of the time may be spent on the anchor's digest while the anchor changes
MEAN_DECAY = 0.95  # of a running mean at each step: about twenty steps count


@dataclass
class TrainingMetrics:
    """What the training loop measures. Losses are in nats a token."""

    key: str  # this machine's public key
    activity: Activity = Activity.JOINING  # what the worker does now
    reason: str = ""  # why it waits, for its owner; "" while it does not
    # Why it takes no steps although the run goes on; None while it does.
    pause: TrainingDecision | None = None
    # What is wrong while it trains all the same, for its owner; "" if nothing is.
    warning: str = ""
    memory_shortages: int = 0  # how often memory has run short, so that a smaller plan was needed
    is_resting: bool = False  # whether a pause has freed the memory
    step: int = 0  # steps taken, abandoned ones included: the position in the data
    abandoned_steps: int = 0  # those of this process whose loss or gradient was not finite
    # By the wall clock, including exchange and evaluation; 0 while idle. Like `step_seconds` a
    # running mean over about twenty steps.
    tokens_per_second: float = 0.0
    step_seconds: float | None = None  # of one step, as measured by the engine
    loss: float | None = None  # of the last step
    learning_rate: float | None = None  # of the last step
    gradient_norm: float | None = None  # before clipping, a running mean over about twenty steps
    plan: PlanView | None = None  # how this machine trains; set once the plan is made
    last_validation: tuple[int, float] | None = None  # (ledger tokens, loss)
    checkpoint: CheckpointView | None = None  # the last anchor that was recorded
    # Whether reports state the anchor's digest; a crew's fragments lie on other machines, so that
    # only `record_checkpoint` computes it.
    digests_anchor: bool = True
    crew: list[CrewSeatView] = field(default_factory=list)  # the machines of the crew it leads

    def __post_init__(self) -> None:
        self._losses: list[float] = []  # of the steps since the last point
        self._last_tokens = 0  # at the last of these steps
        self._points: list[MeasuredLoss] = []  # since the last report
        self._first_validation: tuple[int, float] | None = None  # (ledger tokens, loss)
        # The digest of the anchor's version vector, and of the anchor at that vector.
        self._digests: tuple[str, str | None] = ("0" * 64, None)
        self._next_digest_at = 0.0  # when the digest may be computed again
        self._samples: SamplesView | None = None  # since the last report
        self._last_step_at: float | None = None  # when the last step ended
        self._measured_steps = 0  # steps that `step_seconds` averages
        self._wall_seconds = 0.0  # between the ends of two steps, a running mean
        self._last_status_at = self._last_point_at = time.monotonic()

    def record_step(
        self, stats: StepStats, tokens: int, learning_rate: float | None = None
    ) -> None:
        """Record a step, with the tokens of all updates before it and of this round's steps."""
        self.step += 1
        self.learning_rate = learning_rate
        if stats.abandoned:
            self.abandoned_steps += 1
            log.warning(
                "step %d gave a loss or a gradient that is not finite: its round is dropped",
                self.step,
            )
            return
        now = time.monotonic()
        seconds = now - self._last_step_at if self._last_step_at else stats.seconds
        self._last_step_at = now
        if self.tokens_per_second:
            seconds = MEAN_DECAY * self._wall_seconds + (1 - MEAN_DECAY) * seconds
        self._wall_seconds = seconds
        self.tokens_per_second = stats.tokens / self._wall_seconds
        self.loss = stats.loss
        self._measured_steps += 1
        # A plain mean at first, so that the first step, the slowest of all, soon counts little.
        share = max(1 - MEAN_DECAY, 1 / self._measured_steps)
        self.step_seconds = (1 - share) * (self.step_seconds or 0.0) + share * stats.seconds
        norm = stats.norm if self.gradient_norm is None else self.gradient_norm
        self.gradient_norm = MEAN_DECAY * norm + (1 - MEAN_DECAY) * stats.norm
        self._losses.append(stats.loss)
        self._last_tokens = tokens
        if time.monotonic() - self._last_point_at > POINT_SECONDS:
            self._add_point(tokens)

    def record_validation(self, ledger_tokens: int, loss: float) -> None:
        """Record the anchor's validation loss at `ledger_tokens`."""
        self.last_validation = (ledger_tokens, loss)
        self._first_validation = self._first_validation or self.last_validation
        self._points.append(MeasuredLoss(kind="validation", tokens=ledger_tokens, loss=loss))

    def record_samples(self, samples: SamplesView) -> None:
        """Record samples that were written with the anchor, for the next report."""
        self._samples = samples

    def record_checkpoint(self, anchor: Anchor, size: int) -> str:
        """Record the digests of an anchor on disk, for other machines to compare with theirs.

        It costs a pass over all weights, as the validation before it did.

        Returns:
            The anchor's digest.
        """
        vector = anchor.vector_digest()
        known_digest = self._digests[1] if vector == self._digests[0] else None
        anchor_digest = known_digest or anchor.digest()
        self._digests = (vector, anchor_digest)
        self.checkpoint = CheckpointView(
            tokens=anchor.tokens,
            vector=vector,
            digest=anchor_digest,
            checksum=anchor.checksum(),
            size=size,
        )
        return anchor_digest

    def set_training(self) -> None:
        """Record that the worker trains now."""
        self._set_activity(Activity.TRAINING, None)

    def set_idle(self, activity: Activity, pause: TrainingDecision | None = None) -> None:
        """Record that the worker does not train now, and why."""
        self._set_activity(activity, pause)
        self.tokens_per_second = 0.0
        self._last_step_at = None

    def _set_activity(self, activity: Activity, pause: TrainingDecision | None) -> None:
        if activity is not self.activity:
            self._last_status_at = -math.inf  # who pauses a worker looks whether it does
        self.activity = activity
        self.pause = pause
        self.reason = pause.reason if pause is not None else ""

    def is_status_due(self) -> bool:
        """Return whether the last status is old."""
        interval = REST_STATUS_SECONDS if self.is_resting else STATUS_SECONDS
        return time.monotonic() - self._last_status_at >= interval

    def compose_report(
        self, anchor: Anchor, stats: ExchangeStats, incarnation: str, addresses: Sequence[str]
    ) -> Report:
        """Compose a report, which the spool numbers. The loss points are in it, and only in it."""
        self._last_status_at = time.monotonic()
        vector = anchor.vector_digest()
        if vector != self._digests[0] or self._digests[1] is None:
            self._digests = (vector, self._digest_if_affordable(anchor))
        if self._losses and self.tokens_per_second == 0.0:
            self._add_point(self._last_tokens)
        points, self._points = self._points[:MAX_POINTS], self._points[MAX_POINTS:]
        samples = self._samples
        self._samples = None
        own_heads = [head for head in anchor.heads.values() if head.peer == self.key]
        other_heads = [head for head in anchor.heads.values() if head.peer != self.key]
        return Report(
            seq=1,
            at=time.time(),
            version=__version__,
            activity=self.activity,
            incarnation=incarnation,
            addresses=list(addresses),
            step=self.step,
            tokens=sum(head.total for head in own_heads),
            ledger_tokens=anchor.tokens,
            rate=self.tokens_per_second,
            abandoned_steps=self.abandoned_steps,
            updates_sent=sum(head.seq for head in own_heads),
            updates_received=sum(head.seq for head in other_heads),
            peers=stats.peers,
            peer_bytes_sent=stats.bytes_sent,
            peer_bytes_received=stats.bytes_received,
            vector=self._digests[0],
            anchor=self._digests[1],
            plan=self.plan,
            step_seconds=self.step_seconds,
            exchange=stats.summary,
            checkpoint=self.checkpoint,
            learning_rate=self.learning_rate,
            gradient_norm=self.gradient_norm,
            links=describe_links(stats.neighbours),
            points=points,
            samples=samples,
            crew=self.crew,
            pause=self.pause.view if self.pause else None,
            pause_sentence=self.reason[:MAX_PAUSE_TEXT] if self.pause else "",
        )

    def status_fields(self) -> dict[str, Any]:
        """Return the fields of a `LocalStatus` that a report does not have."""
        return {
            "reason": self.reason,
            "warning": self.warning,
            "memory_shortages": self.memory_shortages,
            "loss": self.loss,
            "validation_first": self._first_validation,
            "validation_last": self.last_validation,
        }

    def _digest_if_affordable(self, anchor: Anchor) -> str | None:
        """Compute the anchor's digest, a large one less often than it changes.

        Returns:
            None before this machine has an anchor, and while computing would cost too much time.
        """
        now = time.monotonic()
        is_final = self.activity in (Activity.FINISHED, Activity.LEFT, Activity.FETCHING)
        if not self.digests_anchor:
            return None
        if not len(anchor.fragments) or not (is_final or now >= self._next_digest_at):
            return None
        anchor_digest = anchor.digest()
        self._next_digest_at = now + (time.monotonic() - now) / DIGEST_SHARE
        return anchor_digest

    def _add_point(self, tokens: int) -> None:
        mean = sum(self._losses) / len(self._losses)
        self._points.append(MeasuredLoss(kind="train", tokens=tokens, loss=mean))
        self._losses = []
        self._last_point_at = time.monotonic()


def describe_links(neighbours: Sequence[NeighbourView]) -> list[LinkView]:
    """Describe the connections that carry most, for the coordinator's graph of the swarm."""
    by_traffic = sorted(neighbours, key=lambda peer: peer.up + peer.down, reverse=True)
    return [
        LinkView(
            peer=peer.key[:16],
            sent_rate=round(peer.up),
            received_rate=round(peer.down),
            agrees=peer.agrees,
            relayed=peer.relayed,
        )
        for peer in by_traffic[:MAX_LINKS]
    ]
