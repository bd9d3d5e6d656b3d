"""How far this machine has come: the figures behind its reports, its status file and its terminal line."""

import json
import logging
import time
from collections.abc import Mapping, Sequence, Sized
from typing import Any, Protocol

from barnraise.coordinator_client.reporter import WorkerFigures
from barnraise.protocol.enums import Activity
from barnraise.protocol.messages import Update
from barnraise.protocol.reports import CheckpointView, ExchangeView, LossPoint, PlanView
from barnraise.protocol.signing import digest

log = logging.getLogger("barnraise")

TELL_EVERY = 0.5  # seconds between two status files
POINT_EVERY = 2.0  # seconds of training loss that make one point
DIGEST_SHARE = 0.02  # of the time, for the anchor's digest while it changes
KEPT = 0.95  # of a running mean at each step: some twenty steps count


class Step(Protocol):
    loss: float
    tokens: int
    seconds: float
    abandoned: bool


class Neighbour(Protocol):
    key: str
    lag: int
    sent_rate: float
    received_rate: float
    agrees: bool | None


class Links(Protocol):
    peers: int
    bytes_sent: int
    bytes_received: int
    neighbours: Sequence[Neighbour]

    @property
    def summary(self) -> ExchangeView | None: ...


class SharedWeights(Protocol):
    heads: Mapping[str, Update]
    retracted: Mapping[str, Mapping[int, int]]

    @property
    def fragments(self) -> Sized: ...

    @property
    def vector(self) -> Mapping[str, int]: ...

    @property
    def tokens(self) -> int: ...

    def digest(self) -> str: ...

    def checksum(self) -> str: ...


class TrainingMetrics:
    """Filled by the loop, read when it tells. Losses in nats.

    `rate`: tokens/s by the wall clock, trading and validating included. `step_seconds`: what the engine says a step
    takes, without these. Both are running means over some twenty steps. `plan` is the loop's to set.
    """

    def __init__(self, key: str):
        self.key = key
        self.activity = Activity.JOINING
        self.step = 0
        self.tokens_per_second = 0.0
        self.loss: float | None = None
        self.plan: PlanView | None = None
        self.step_seconds: float | None = None
        self._losses: list[float] = []  # since the last point
        self._points: list[LossPoint] = []  # since the reporter was last told
        self._first: tuple[int, float] | None = None  # validation: (ledger tokens, loss)
        self._last: tuple[int, float] | None = None
        self._digests: tuple[str, str | None] = (
            "0" * 64,
            None,
        )  # of the version vector, and of the anchor at it
        self._next_digest = 0.0  # when one costs little again
        self._checkpoint: CheckpointView | None = None
        self._neighbours: Sequence[Neighbour] = ()
        self._ended: float | None = None  # when the step before this one did
        self._measured = 0  # steps that `step_seconds` is the mean of
        self._seconds = 0.0  # between the ends of two steps, a running mean
        self._told = self._pointed = time.monotonic()

    def record_step(self, stats: Step, ledger_tokens: int) -> None:
        self.step += 1
        if stats.abandoned:
            log.warning(
                "step %d gave a loss or a gradient that is not finite: its round is dropped",
                self.step,
            )
            return
        now = time.monotonic()
        seconds = now - self._ended if self._ended else stats.seconds
        self._ended = now
        self._seconds = (
            KEPT * self._seconds + (1 - KEPT) * seconds if self.tokens_per_second else seconds
        )
        self.tokens_per_second = stats.tokens / self._seconds
        self.loss = stats.loss
        self._measured += 1
        share = max(
            1 - KEPT, 1 / self._measured
        )  # a plain mean at first: the first step, slower than all, fades soon
        self.step_seconds = (1 - share) * (self.step_seconds or 0.0) + share * stats.seconds
        self._losses.append(stats.loss)
        if time.monotonic() - self._pointed > POINT_EVERY:
            self._point(ledger_tokens)

    def record_validation(self, ledger_tokens: int, loss: float) -> None:
        self._last = (ledger_tokens, loss)
        self._first = self._first or self._last
        self._points.append(LossPoint(kind="validation", tokens=ledger_tokens, loss=loss))

    def record_checkpoint(self, anchor: SharedWeights, size: int) -> None:
        """The anchor as it stands is on disk, or is what the ledger leads to: `size` bytes, for others to compare with
        theirs. As dear as one look at all weights, which validating them was too."""
        vector = anchor_vector_digest(anchor)
        known = self._digests[1] if vector == self._digests[0] else None
        self._digests = vector, known or anchor.digest()
        self._checkpoint = CheckpointView(
            tokens=anchor.tokens,
            vector=vector,
            digest=self._digests[1],
            checksum=anchor.checksum(),
            size=size,
        )

    def set_idle(self, activity: Activity) -> None:
        """Not training now."""
        self.activity, self.tokens_per_second, self._ended = activity, 0.0, None

    def due(self, at_once: bool) -> bool:
        """Whether it is time to tell again."""
        if at_once or time.monotonic() - self._told >= TELL_EVERY:
            self._told = time.monotonic()
            return True
        return False

    def numbers(
        self, anchor: SharedWeights, links: Links, incarnation: str, addresses: Sequence[str]
    ) -> WorkerFigures:
        """For a report; the points go with it and are not told again."""
        vector = anchor_vector_digest(anchor)
        if vector != self._digests[0] or self._digests[1] is None:
            self._digests = (vector, self._digest(anchor))
        if self._losses and self.tokens_per_second == 0.0:
            self._point(anchor.tokens)
        points, self._points = tuple(self._points), []
        self._neighbours = links.neighbours
        mine = [head for head in anchor.heads.values() if head.peer == self.key]
        others = [head for head in anchor.heads.values() if head.peer != self.key]
        return WorkerFigures(
            activity=self.activity,
            incarnation=incarnation,
            addresses=tuple(addresses),
            step=self.step,
            tokens=sum(head.total for head in mine),
            ledger_tokens=anchor.tokens,
            rate=self.tokens_per_second,
            updates_sent=sum(head.seq for head in mine),
            updates_received=sum(head.seq for head in others),
            peers=links.peers,
            peer_bytes_sent=links.bytes_sent,
            peer_bytes_received=links.bytes_received,
            vector=self._digests[0],
            anchor=self._digests[1],
            plan=self.plan,
            step_seconds=self.step_seconds,
            exchange=links.summary,
            checkpoint=self._checkpoint,
            points=points,
        )

    def _digest(self, anchor: SharedWeights) -> str | None:
        """The anchor's digest, where it is worth its time: a large one is looked at less often than it changes. None
        before this machine has joined."""
        now = time.monotonic()
        ended = self.activity in (Activity.FINISHED, Activity.LEFT)
        if not len(anchor.fragments) or not (ended or now >= self._next_digest):
            return None
        found = anchor.digest()
        self._next_digest = now + (time.monotonic() - now) / DIGEST_SHARE
        return found

    def status(self, numbers: WorkerFigures) -> dict[str, Any]:
        """The same figures for people and programs on this machine."""
        return {
            "at": time.time(),
            "activity": numbers.activity,
            "step": numbers.step,
            "tokens": numbers.tokens,
            "ledger_tokens": numbers.ledger_tokens,
            "rate": numbers.rate,
            "loss": self.loss,
            "validation_first": self._first,
            "validation_last": self._last,
            "updates_sent": numbers.updates_sent,
            "updates_received": numbers.updates_received,
            "peers": numbers.peers,
            "peer_bytes": numbers.peer_bytes_sent,
            "exchange": numbers.exchange.model_dump() if numbers.exchange else None,
            "neighbours": [
                {
                    "key": each.key,
                    "lag": each.lag,
                    "up": each.sent_rate,
                    "down": each.received_rate,
                    "agrees": each.agrees,
                }
                for each in self._neighbours
            ],
            "vector": numbers.vector,
            "anchor": numbers.anchor,
            "plan": numbers.plan.model_dump() if numbers.plan else None,
            "step_seconds": numbers.step_seconds,
        }

    def _point(self, ledger_tokens: int) -> None:
        mean = sum(self._losses) / len(self._losses)
        self._points.append(LossPoint(kind="train", tokens=ledger_tokens, loss=mean))
        self._losses, self._pointed = [], time.monotonic()


def anchor_vector_digest(anchor: SharedWeights) -> str:
    """The digest of what is in an anchor: equal on machines whose anchors must be."""
    held = [dict(anchor.vector), anchor.retracted] if anchor.retracted else dict(anchor.vector)
    return digest(json.dumps(held, sort_keys=True))
