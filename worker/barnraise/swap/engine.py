"""One machine's training under a plan: local steps on a replica, and the arithmetic between it, anchor and updates.

A step is a program of operations (`schedule.py`, `operations.py`). Between steps, `harvest`, `add`, `evaluate` and the
rest go fragment by fragment, tile by tile, so that a model larger than memory trades and is judged like a small one.
One thread calls all of this.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from barnraise.errors import StateError
from barnraise.models import gpt2 as gpt
from barnraise.models.gpt2 import views
from barnraise.planning import program
from barnraise.planning.plan import KINDS, Plan
from barnraise.spec import Recipe
from barnraise.swap.adam_moments import Moments
from barnraise.swap.arena import give_back, to_float
from barnraise.swap.executor import ArrivalLike, Operations, Progress, Update, decoded
from barnraise.swap.forward_backward import Passes
from barnraise.swap.fused_loss import head_loss
from barnraise.swap.outer_optimizer import Outer
from barnraise.swap.state_store import TRADING, TRAINING, Shelf, Store
from barnraise.swap.tiles import Tiles

FOLDED = 16  # updates folded in at a time: their sum stays below 2**31
WARM_UP = 20  # steps over which a machine that lost its moments comes back to its rate

Encode = Callable[
    [Tensor], tuple[bytes, Tensor]
]  # int32 [n] → payload, and the int32 [n] it decodes to


class AnchorLike(Protocol):
    def note(self, header: Any) -> None: ...


@dataclass(frozen=True)
class StepStats:
    """`loss`: nats a token before the step; `norm`: of the gradient before clipping. `abandoned`: a loss or gradient
    was not finite, the round's progress is dropped (the replica is the anchor again) and `tokens` is 0."""

    loss: float
    tokens: int
    seconds: float
    norm: float
    abandoned: bool = False


class Engine:
    """`store` holds the state, `anchor` is told which updates are in. `describe(progress)`: what a manifest is to say
    that the state belongs to (asked for states on disk only). `progress`: where the state in the store stands."""

    def __init__(
        self,
        plan: Plan,
        recipe: Recipe,
        store: Store,
        anchor: AnchorLike,
        describe: Callable[[Progress], str] = lambda progress: "",
        progress: Progress | None = None,
    ):
        self.plan, self.recipe, self.store, self.anchor, self.describe = (
            plan,
            recipe,
            store,
            anchor,
            describe,
        )
        self.device = torch.device(plan.device)
        self.fragments = plan.fragments
        self.operations = Operations(plan, recipe, store, self._mark)
        self.buffers = self.operations.buffers
        self.anchors = self.operations.anchors
        self.tiles = Tiles(plan, store, self.buffers)
        self.outer = Outer(recipe, store, self.tiles)
        self._nothing = (0.0,) * len(self.fragments)  # is guessed
        standing = progress or Progress()
        self._guess = standing.guess or self._nothing  # what it is to be
        self.progress = replace(standing, guess=self._guess)
        self._arrivals: list[ArrivalLike] = []
        self._pending: Update | None = None
        if progress is None:
            self.reset_round()
        else:
            self._mend()

    # ---- training --------------------------------------------------------------------------------------------

    @property
    def ahead(self) -> Progress:
        """With the step whose update is pending."""
        return self._pending.progress if self._pending else self.progress

    @property
    def round_tokens(self) -> int:
        """Trained on since the last harvest: what the next update's header states."""
        return self.ahead.round_tokens

    def step(self, batches: list[Tensor], rate_scale: float = 1.0, position: int = 0) -> StepStats:
        """One AdamW step on the mean gradient of the micro-batches (int64 [sequences, context + 1] each), clipped as
        the plan says. `rate_scale` is what `schedule` says; `position`: where in the data the next step begins.
        Raises StateError or DamageError when a tier fails; what the manifest names is whole then."""
        started = time.perf_counter()
        tokens = [batch.shape[0] * (batch.shape[1] - 1) for batch in batches]
        shares = [mine / sum(tokens) for mine in tokens]
        passes = Passes(
            self.plan,
            [batch.to(self.device) for batch in batches],
            shares,
            self.operations.boundaries(),
        )
        before, exact = self._pending, self.plan.clipping == "exact"
        if exact and before is not None:
            self._burden(before)
        now = self._next(rate_scale, sum(tokens), position, passes)
        if not exact:
            self._burden(now)
        update = before if exact else now
        folds = update is not None and bool(update.arrivals)
        if folds:
            self.operations.drain()  # the anchor's free slots are only free once the last commit is made
        self.operations.run(partial(program.step, pending=before is not None), update, passes)
        if folds:
            self.operations.drain()
            self._note(update)
        if before is not None:
            self.progress, self._pending = before.progress, None
        figures = [*passes.losses, *(passes.norms[i] for i in range(len(self.fragments)))]
        figures = torch.stack(
            [figure.double().to(self.device) for figure in figures]
        ).tolist()  # the step's only wait
        loss = sum(figures[: len(batches)])
        norm = math.sqrt(sum(n * n for n in figures[len(batches) :]))
        abandoned = not (math.isfinite(loss) and math.isfinite(norm))
        if abandoned:
            self.progress = replace(self.progress, position=position)
            self.reset_round()
        elif exact:
            now.shrink = max(1.0, norm / self.recipe.clip)
            self._pending = now
            if not self.plan.defers:
                self.flush()
        else:
            self.progress = now.progress
        return StepStats(
            loss, 0 if abandoned else sum(tokens), time.perf_counter() - started, norm, abandoned
        )

    def _next(self, rate_scale: float, tokens: int, position: int, passes: Passes) -> Update:
        ahead = self.ahead
        warmth = 1 - ahead.warming / (WARM_UP + 1)
        warming = max(0, ahead.warming - 1)
        done = Progress(
            position, ahead.round_tokens + tokens, ahead.updates + 1, warming, ahead.guess
        )
        shrink = 1.0 if self.plan.clipping == "none" else None
        rate = self.recipe.learning_rate * rate_scale * warmth
        return Update(rate, done.updates, shrink, self._nothing, done, passes.norms)

    def _burden(self, update: Update) -> None:
        """What came in meanwhile goes the way of an update."""
        update.arrivals, self._arrivals = self._arrivals[:FOLDED], self._arrivals[FOLDED:]
        update.guess = self._growth(update.progress)
        update.progress = replace(update.progress, guess=self._guess)

    def flush(self) -> None:
        """Makes the pending updates now."""
        if (update := self._pending) is not None:
            self.operations.run(program.flush, update)
            self.progress, self._pending = update.progress, None

    def _mark(self, update: Update) -> str:
        """The mark of what a running program commits: all that it folds in is in by then."""
        self._note(update)
        return self.describe(update.progress)

    def _note(self, update: Update) -> None:
        for arrival in update.arrivals:
            self.anchor.note(arrival.header)
        update.arrivals = []

    # ---- trading ---------------------------------------------------------------------------------------------

    def add(self, *arrivals: ArrivalLike, guess: tuple[float, ...] | None = None) -> None:
        """Other authors' updates, at any moment of a round, and a guess of those that are still under way: by how many
        of its momenta each fragment of the replica is to be ahead (the last guess stays where none is given). In memory
        both are folded in at once; a state on another tier takes them when the next step's updates pass by (or `settle`
        is called)."""
        if not arrivals and guess in (None, self._guess):
            return
        self._arrivals += arrivals
        self._guess = self._guess if guess is None else guess
        if not (self.plan.on_disk or self.plan.staged):
            self.settle()

    @torch.no_grad()
    def settle(self) -> None:
        """All that was added is in the anchor, the replica has the guess it was to have, and nothing is under way."""
        self.operations.drain()
        while (arrivals := self._arrivals[:FOLDED]) or self._guess != self.progress.guess:
            growth = self._growth(self.progress)
            for i in range(len(self.fragments)):
                units = decoded(arrivals, i)
                if units is None and not growth[i]:
                    continue
                for t, (_, _, moments, weights) in enumerate(self.tiles.of(i)):
                    self.operations.fold(i, t, units, growth[i], weights, moments)
                del units  # before the next fragment's are made
            for arrival in arrivals:
                self.anchor.note(arrival.header)
            self._arrivals = self._arrivals[len(arrivals) :]
            self._guessed()
            self.operations.forget_copies()
            if self.plan.commits_steps and self._pending is None:
                self.commit()

    def _growth(self, progress: Progress) -> tuple[float, ...]:
        """By how much each fragment's guess is to grow from where `progress` has it."""
        return tuple(
            to_be - is_now for to_be, is_now in zip(self._guess, progress.guess, strict=True)
        )

    def _guessed(self) -> None:
        """The replica holds the guess that it was to have."""
        self.progress = replace(self.progress, guess=self._guess)
        if self._pending is not None:
            self._pending.progress = replace(self._pending.progress, guess=self._guess)

    def harvest(
        self, encode: Encode, weight: float, due: Collection[int] | None = None
    ) -> Iterator[tuple[bytes, Tensor] | None]:
        """Ends the round: for each fragment in order the update's payload and the integers it decodes to, by then
        applied to the anchor and the replica. Consume it whole, then `anchor.note` the header and `commit`. `weight`:
        this author's share, 0…1. `due`: the fragments whose round ends; the others go on, and None comes for them. A
        step whose update is pending counts in the next round of those, so that it may stay so.

        Δ ← w(anchor − g·m − replica), g the fragment's guess; m ← μm + Δ; s = η(Δ + μm); e ← round(βe) + round(s/unit);
        the update is −C(e). The two are rounded apart so that with β = 1 sent plus residual is exactly the sum of the
        rounded steps."""
        if due is None:
            self.flush()
        self.settle()
        give_back()
        for i in range(len(self.fragments)):
            if due is not None and i not in due:
                yield None
                continue
            with torch.no_grad():  # as a decorator it would hold on to what was yielded last
                values = self.buffers.scratch(i)
                self.outer.owe(i, values, weight, self.progress.guess[i])
                payload, units = encode(values)
                self.outer.say(i, values, units, self.progress.guess[i])
            yield payload, units
            del payload, units  # before the next fragment's are made
        self.operations.forget_copies()
        self.progress = replace(self.progress, round_tokens=0)
        if self._pending is not None:
            self._pending.progress = replace(self._pending.progress, round_tokens=0)

    @torch.no_grad()
    def reset_round(self) -> None:
        """The replica is the anchor again; what the round had learnt, and the guess, are dropped."""
        self._pending, self._guess = None, self.progress.guess
        self.settle()
        spare = self.buffers.spare(1)
        for i in range(len(self.fragments)):
            for t, (begin, end, moments, weights) in enumerate(self.tiles.of(i, reads=False)):
                anchor = self.store.tile("anchor", i, t, spare)[: 4 * (end - begin)].view(
                    torch.int32
                )
                self.tiles.put(moments, weights, to_float(anchor))
        self.operations.forget_copies()
        self._guess = self._nothing
        self.progress = replace(self.progress, round_tokens=0, guess=self._nothing)
        if self.plan.on_disk and self.store.mark is not None:
            self.commit()

    def forget_feedback(self) -> None:
        """The ledger holds an update of mine newer than the saved feedback: what it owed may have been said already."""
        self.store.clear("feedback")

    def forget_momentum(self) -> None:
        """A verdict took out what the momentum followed. What this machine owes stays owed."""
        self._guess = self._nothing  # it was made of it
        self.settle()
        self.store.clear("momentum")

    def mend(self, index: int, units: Tensor) -> None:
        """Fragment `index` of the anchor was damaged and must be int32 [n] `units`. The round is dropped."""
        self.operations.drain()
        self.anchors[index] = units
        self.reset_round()

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Tensor]) -> float:
        """Mean loss of the *anchor*, whatever the replica is in the middle of: peers with one anchor get one number.

        Layer by layer over all batches, so that one layer's weights are unpacked at a time."""
        self.settle()
        batches = [
            part.to(self.device) for batch in batches for part in batch.split(self.plan.sequences)
        ]
        embedding = self._anchored(0)
        streams = [gpt.embed(embedding, batch[:, :-1]) for batch in batches]
        for i in self.plan.blocks:
            weights = self._anchored(i)
            for m, stream in enumerate(streams):
                streams[m] = gpt.block(weights, stream, self.plan.model.heads)
            del weights, stream
        final, total, count = self._anchored(self.plan.last), 0.0, 0
        for batch, stream in zip(batches, streams, strict=True):
            targets = batch[:, 1:]
            total += head_loss(final, embedding["token"], stream, targets).item() * targets.numel()
            count += targets.numel()
        return total / count

    def _anchored(self, i: int) -> gpt.Weights:
        give_back()
        return views(self.fragments[i], to_float(self.anchors[i]).to(self.device))

    # ---- keeping ---------------------------------------------------------------------------------------------

    def commit(self, closing: bool = False) -> None:
        """A state on disk: what is there is now the state. `closing`: with what only memory held."""
        self.flush()
        self.operations.drain()
        if not self.plan.commits_steps:
            self.store.save_held(KINDS if closing else ("anchor", *TRADING))
        held = any(
            self.store.held(kind, i) is not None
            for kind in TRAINING
            for i in range(len(self.fragments))
        )
        self.store.commit(self.describe(self.progress), whole=closing or not held)

    def _mend(self) -> None:
        """What the manifest said is not whole begins anew: the replica at the anchor, all else at zero, as the store
        has it then, and the moments with a warm-up."""
        void = self.store.void
        if void & set(TRAINING):
            self.progress = replace(self.progress, updates=0, warming=WARM_UP)
            self.reset_round()
        elif void and any(self.progress.guess):
            self.reset_round()  # the guess in the replica was made of a momentum that may be gone
        elif void:
            self.commit()
        self.operations.forget_copies()

    def state(self) -> dict[str, Tensor]:
        """All that a restart needs besides the anchor's heads, on the host, by reference where it lies there. The
        replica is not in it: a restart begins a round. For states in memory; one on disk is its own."""
        self.flush()
        self.settle()
        tensors = {"progress": torch.tensor([self.progress.updates, self.progress.warming])}
        for i, fragment in enumerate(self.fragments):
            m, v = Moments.of(self.plan, self.store.span("moments", i, 0), fragment.size).wide()
            tensors |= {f"m.{i}": m.cpu(), f"v.{i}": v.cpu()}
            for kind, shelf in self._shelves():
                tensors[f"{kind}.{i}"] = shelf[i]
        return tensors

    def _shelves(self) -> list[tuple[str, Shelf]]:
        floats = Shelf(self.store, "momentum", torch.float32)
        return [
            ("anchor", self.anchors),
            ("momentum", floats),
            ("feedback", Shelf(self.store, "feedback")),
        ]

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes back what `state` gave, of any plan, and begins a round. Raises StateError, with nothing changed, if
        it does not fit."""
        wanted: dict[str, tuple[int, torch.dtype]] = {"progress": (2, torch.int64)}
        for i, fragment in enumerate(self.fragments):
            wanted |= {
                f"{kind}.{i}": (fragment.size, torch.float32) for kind in ("m", "v", "momentum")
            }
            wanted |= {
                f"{kind}.{i}": (fragment.size, torch.int32) for kind in ("anchor", "feedback")
            }
        given = {name: (tensors[name].numel(), tensors[name].dtype) for name in tensors}
        if wrong := sorted(name for name, _ in wanted.items() ^ given.items()):
            raise StateError(f"the saved state is not of this model: '{wrong[0]}' does not fit")
        updates, warming = tensors["progress"].tolist()
        self.progress = Progress(updates=updates, warming=warming, guess=self._nothing)
        for i in range(len(self.fragments)):
            for kind, shelf in self._shelves():
                shelf[i] = tensors[f"{kind}.{i}"]
            m, v = tensors[f"m.{i}"], tensors[f"v.{i}"]
            for t in range(self.plan.tile_count(i)):
                begin, end = self.plan.bounds(i, t)
                record = self.tiles.own("moments", i, t, 4, reads=False)
                Moments.of(self.plan, record, end - begin).take(m[begin:end], v[begin:end])
                self.store.keep("moments", i, t, record)
        self.reset_round()

    def close(self) -> None:
        """Ends the lanes. The state stays as the last commit left it."""
        self.operations.close()
        self.store.close()
