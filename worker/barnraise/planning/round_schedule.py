"""Choose the length of a round and its compression from what the uplink carries. Pure."""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from barnraise.planning.compression_ladder import (
    COMPRESSION_LADDER,
    DEFAULT_SCHEME,
    LONG_ROUNDS,
    MIN_CARRY_ROUNDS,
    SCHEMES,
    SPARSE_ROUNDS,
)
from barnraise.planning.fragment_streaming import StreamingSchedule, fit_to_round
from barnraise.planning.quantization_scheme import QuantizationScheme
from barnraise.planning.round_limits import MAX_STRETCH, PLAIN_ROUNDS
from barnraise.planning.update_header import TYPICAL_HEADER_BYTES
from barnraise.planning.uplink_budget import HEADER_SHARE
from barnraise.spec import AUTO, Recipe, RunSpec

# In which the first update is sent, where the uplink is known and the first step's time is not.
FIRST_UPDATE_SECONDS = 30.0


@dataclass(frozen=True)
class RoundSchedule:
    """When a round ends and how its update is compressed.

    Times are in seconds since 1970, by the clock that the machines share.

    Attributes:
        steps: The steps of the round; an estimate if the clock ends it.
        scheme: How its update is compressed.
        ends_at: When the clock ends the round, or its next part; inf if `steps` ends it.
        period: The length of the round in seconds; inf if `steps` ends it.
        streaming: The parts of the round; None if it is published at once.
        min_part_seconds: The seconds of the shortest part, if the headers of shorter ones would
            fill the uplink; 0 if not.
        last_published_at: When this machine published last.
        carries_residual: Whether the next round begins with what the update leaves out.
        is_long: Whether it is so long that a machine's first rounds have no outer momentum.
    """

    steps: int
    scheme: QuantizationScheme
    ends_at: float = math.inf
    period: float = math.inf
    streaming: StreamingSchedule | None = None
    min_part_seconds: float = 0.0
    last_published_at: float = 0.0
    carries_residual: bool = False
    is_long: bool = False

    def is_over(self, steps: int, now: float) -> bool:
        """Return whether the round ends after `steps` steps, at `now`.

        A clock that jumps lengthens the round in which it jumps at most by MAX_STRETCH.
        """
        if math.isinf(self.ends_at):
            return steps >= self.steps
        return steps > 0 and (now >= self.ends_at or steps >= int(MAX_STRETCH * self.steps))

    def steps_until_sent(self, step_seconds: float, parameters: int, update_rate: float) -> float:
        """Return the steps of a round that waits until its update, at bytes per second, is sent."""
        sending = self.scheme.payload_size(parameters) / max(update_rate, 1e-9)
        return max(self.steps, sending / step_seconds)

    def has_momentum(self, rounds_published: int) -> bool:
        """Return whether the round's update contains momentum of the rounds before.

        A machine's first long rounds go far, each in a direction of its own, and momentum would go
        most of that way again. `rounds_published` counts this machine's rounds so far.
        """
        return not self.is_long or rounds_published >= PLAIN_ROUNDS

    @property
    def updates_per_round(self) -> int:
        """Count the updates that a round is published in."""
        return 1 if self.streaming is None else len(self.streaming.ends)

    def fragments_due(self, now: float) -> Collection[int] | None:
        """Return the fragments to publish once the round is over; None for all of them."""
        if self.streaming is None:
            return None
        since = self.last_published_at / self.period
        return self.streaming.fragments_due(since, now / self.period) or None

    def with_streaming(
        self, sizes: tuple[int, ...], last_published_at: float, now: float
    ) -> "RoundSchedule":
        """Return this schedule, split into parts if the round is long enough for two.

        The times are in seconds since 1970.
        """
        streaming = fit_to_round(sizes, self.period, self.steps, self.min_part_seconds)
        if math.isinf(self.period) or len(streaming.ends) == 1:
            return self
        return replace(
            self,
            ends_at=self.period * streaming.next_end(now / self.period),
            streaming=streaming,
            last_published_at=last_published_at,
        )


def choose_schedule(
    spec: RunSpec,
    update_rate: float,
    step_seconds: float | None,
    run_steps: float = math.inf,
) -> RoundSchedule:
    """Choose a machine's next round without regard to its peers.

    A recipe with a fixed codec sets it. With "auto" the uplink does, see `UplinkUse`. Until the
    uplink has been measured, rounds are as long as the recipe says and
    updates use DEFAULT_SCHEME. Where the uplink is known and the first step's time is not, a round
    is as long too, and its update takes FIRST_UPDATE_SECONDS if any scheme allows that.

    Args:
        spec: The run's spec.
        update_rate: Bytes per second of updates that this machine can publish; inf: not known.
        step_seconds: The length of a training step; None before the first.
        run_steps: The steps of this machine in the whole run; inf if they are not known.
    """
    recipe, parameters, max_steps = spec.recipe, spec.model.parameters, spec.max_round_steps
    if recipe.codec != AUTO:
        scheme = QuantizationScheme.parse(recipe.codec)
        return _build_schedule(recipe.round_steps, scheme, run_steps)
    if math.isinf(update_rate):
        return RoundSchedule(min(recipe.round_steps, max_steps), DEFAULT_SCHEME)
    if step_seconds is None:
        budget = update_rate * FIRST_UPDATE_SECONDS
        fits = [scheme for scheme in SCHEMES if scheme.payload_size(parameters) <= budget]
        scheme = [*fits, SCHEMES[-1]][0]
        return _build_schedule(min(recipe.round_steps, max_steps), scheme, run_steps)
    return fit_to_uplink(update_rate, step_seconds, parameters, max_steps, run_steps)


def fit_to_uplink(
    update_rate: float,
    step_seconds: float,
    parameters: int,
    max_steps: int = 10_000,
    run_steps: float = math.inf,
) -> RoundSchedule:
    """Choose the least compression and the shortest round that an uplink carries.

    A round lasts as long as its update takes to send, so its steps must satisfy

        H ≥ (B + h) / (r · t)

        H   steps of the round                    result
        B   bytes of an update                    `scheme.payload_size(parameters)`
        h   bytes of its header                   TYPICAL_HEADER_BYTES
        r   bytes per second of new updates       `update_rate`
        t   seconds of a step                     `step_seconds`

    COMPRESSION_LADDER is ordered by loss per byte as the study measured it
    (docs/benchmarks/exchange_study.md): every value in two bits every ten steps, then fewer values
    in rounds as short. On a slower link the run decides. Where a machine has hundreds of long
    rounds, it sends every value in them. With fewer it would exchange a few dozen times in the
    whole run; one value in 64 goes out nine times as often, which is better if each value is still
    sent at least once (docs/benchmarks/speedup.md). Otherwise every value is sent in long rounds.

    Four and eight bits cost bytes and gain nothing, and a late update costs more than a smaller
    one; so what a fast link carries beyond the first level makes updates arrive sooner. The first
    level is chosen that link and run have the rounds for, and on it the shortest round that fits. A
    link that carries nothing of all this gets rounds of `max_steps`, of the fewest values where the
    run has enough of them, and its updates take longer than a round to send.

    Args:
        update_rate: Bytes per second of updates that this machine can publish.
        step_seconds: The length of a training step.
        parameters: The parameters of the model.
        max_steps: The longest round that is allowed, because an update may state only so many
            tokens.
        run_steps: The steps of this machine in the whole run; inf if they are not known.
    """
    bytes_per_step = max(update_rate * step_seconds, 1e-9)
    header_seconds = TYPICAL_HEADER_BYTES / max(update_rate, 1e-9)
    min_part_seconds = header_seconds / HEADER_SHARE
    has_rounds = SPARSE_ROUNDS.min_rounds * max_steps <= run_steps
    is_sparse = has_rounds or max_steps < LONG_ROUNDS.min_steps
    chosen = SPARSE_ROUNDS if is_sparse else LONG_ROUNDS
    chosen_steps = max_steps
    for level in COMPRESSION_LADDER:
        update_bytes = level.scheme.payload_size(parameters) + TYPICAL_HEADER_BYTES
        needed = math.ceil(update_bytes / bytes_per_step)
        steps = min(max_steps, max(needed, level.min_steps))
        fits_link = needed <= min(level.max_steps, max_steps)
        if fits_link and level.min_rounds * steps <= run_steps:
            chosen, chosen_steps = level, steps
            break
    return replace(
        _build_schedule(chosen_steps, chosen.scheme, run_steps),
        min_part_seconds=min_part_seconds,
        is_long=chosen_steps >= LONG_ROUNDS.min_steps,
    )


def _build_schedule(steps: int, scheme: QuantizationScheme, run_steps: float) -> RoundSchedule:
    """Return a round of so many steps.

    What a sparse update leaves out is carried into the next round, except where a machine has few
    rounds: while few updates have been sent, the anchor moves faster if what they leave out is
    learnt, and so sent, again (docs/benchmarks/exchange_study.md).
    """
    carries_residual = not scheme.dense and MIN_CARRY_ROUNDS * steps <= run_steps
    return RoundSchedule(steps, scheme, carries_residual=carries_residual)


def align_with_peers(
    recipe: Recipe,
    alone: RoundSchedule,
    step_seconds: float,
    typical_step_seconds: float,
    now: float,
    max_steps: int = 10_000,
) -> RoundSchedule:
    """Align a round, which this machine would choose alone, with its peers', without communication.

    The round ends at the next multiple of a power of two of seconds, by the clock that all machines
    share. A slower machine then ends with the others every second or fourth time. No machine waits:
    a round ends with the first step that is done by then.

    With the codec "auto" the period is at least as long as the uplink demands. Otherwise it is the
    nearest to the recipe's steps at the median machine's speed, so that all have the same period
    and a fast machine takes more steps in it.
    """
    if recipe.codec == AUTO:
        period = 2.0 ** math.ceil(math.log2(alone.steps * step_seconds))
    else:
        period = 2.0 ** round(math.log2(alone.steps * typical_step_seconds))
    steps = max(1, min(int(max_steps / MAX_STRETCH), round(period / step_seconds)))
    ends_at = period * (math.floor(now / period) + 1)
    return replace(alone, steps=steps, ends_at=ends_at, period=period)
