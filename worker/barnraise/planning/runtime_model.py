"""Predict seconds and bytes of each exchange strategy, and choose one. Pure.

Inputs are what machines measure: the time of a step with its deviation, the line, the size of what
is sent. The structure follows Wang et al., arXiv 2410.11998, section 3: a synchronous step costs
the slowest of all machines plus the collective; a decentralised step overlaps its messages with the
next step's arithmetic and waits for neighbours only.

    n   machines                              `Swarm.machines`
    t   seconds of a step's arithmetic        `StepTime.mean_seconds`
    σ   its standard deviation                `StepTime.deviation_seconds`
    P   bytes of all parameters as sent       `payload_bytes`
    u,d bytes per second of a line, up, down  `Line.up_bytes`, `Line.down_bytes`
    ℓ   seconds of a small message            `Line.delay_seconds`
    k   neighbours that a step sends to       `Topology.most_neighbours`

The module imports no torch, because the site uses it.
"""

import math
import random
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

from barnraise.formats import format_share
from barnraise.planning.lines import BITS_PER_BYTE, Line
from barnraise.planning.mixing_topology import TOPOLOGIES, Topology
from barnraise.planning.round_schedule import (
    RoundSchedule,
    fit_to_uplink,
)
from barnraise.planning.uplink_budget import alike_uplink
from barnraise.spec import DECENTRALIZED_ADAM, MIXING_BITS, UPDATES

DATA_PARALLEL = "data-parallel"  # The baseline: no run can have it.
GRADIENT_BITS = 32  # of each element that data parallelism sends
SIMULATED_STEPS = 96
WARMUP_SHARE = 0.25  # of the simulated steps, which are not counted
MAX_SIMULATED = 32  # machines; the wait for neighbours hardly depends on how many others there are
# Machines that agree sooner learn more from each token. So the strategy with the fewest steps to
# consensus is preferred while it trains nearly as many tokens per second as the fastest.
CLOSE_ENOUGH = 0.95
MAX_INTERVAL = 64  # steps between two mixings that the choice considers


@dataclass(frozen=True)
class StepTime:
    """What one machine's step takes without any exchange, as measured.

    Attributes:
        mean_seconds: of a step, above zero.
        deviation_seconds: standard deviation of a step.
        tokens: that a step trains on, above zero.
    """

    mean_seconds: float
    deviation_seconds: float
    tokens: int


@dataclass(frozen=True)
class Swarm:
    """Alike machines on alike lines that train one model, which has so many parameters."""

    machines: int
    parameters: int
    line: Line
    step: StepTime


@dataclass(frozen=True)
class Prediction:
    """What one strategy costs.

    Attributes:
        swarm: the machines.
        strategy: "updates", "decentralized-adam" or, of the baseline, "data-parallel".
        detail: the topology and bits, or the compression.
        round_steps: steps between two exchanges.
        consensus_steps: steps until what one machine learnt has reached all others about evenly.
        step_seconds: of a step with its share of the exchange, in the long run.
        step_bytes: that a machine sends in a step, on average.
        topology: who averages with whom, of decentralised Adam.
        bits: of a weight as sent, of decentralised Adam.
    """

    swarm: Swarm
    strategy: str
    detail: str
    round_steps: int
    consensus_steps: int
    step_seconds: float
    step_bytes: float
    topology: str = ""
    bits: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Return the speed of the whole swarm."""
        return self.swarm.machines * self.swarm.step.tokens / self.step_seconds

    @property
    def bytes_per_token(self) -> float:
        """Return the bytes that a machine sends for each token that it trains on."""
        return self.step_bytes / self.swarm.step.tokens

    @property
    def utilisation(self) -> float:
        """Return the share of time in which a machine computes."""
        return self.swarm.step.mean_seconds / self.step_seconds


@dataclass(frozen=True)
class Choice:
    """The strategy that `auto` stands for, and the numbers behind it.

    Attributes:
        chosen: the strategy's prediction.
        predictions: of all strategies and topologies, those that reach consensus soonest first.
        reason: one sentence.
    """

    chosen: Prediction
    predictions: tuple[Prediction, ...]
    reason: str

    def fastest_of_each(self) -> list[Prediction]:
        """Return the fastest prediction of each strategy; the chosen one stands for its own."""
        fastest = {self.chosen.strategy: self.chosen}
        for each in sorted(self.predictions, key=lambda each: -each.tokens_per_second):
            fastest.setdefault(each.strategy, each)
        return [fastest[name] for name in (UPDATES, DECENTRALIZED_ADAM, DATA_PARALLEL)]


def predict_updates(swarm: Swarm, schedule: RoundSchedule | None = None) -> Prediction:
    """Predict `updates`: nothing waits, unless the line cannot carry the updates at all.

    Each update reaches all other machines and is forwarded over their lines: in every round a line
    carries, each way, the updates of all machines but one. `schedule` is the round of the run;
    None: as `codec: auto` chooses it for the line, in a run without end.
    """
    others = swarm.machines - 1
    step_seconds = swarm.step.mean_seconds
    update_rate = alike_uplink(swarm.line, swarm.machines).update_rate
    if schedule is None:
        schedule = fit_to_uplink(update_rate, step_seconds, swarm.parameters)
    steps = schedule.steps_until_sent(step_seconds, swarm.parameters, update_rate)
    round_bytes = others * schedule.scheme.payload_size(swarm.parameters)
    slowdown = steps / schedule.steps if others else 1.0
    return Prediction(
        swarm,
        UPDATES,
        str(schedule.scheme),
        round_steps=schedule.steps,
        consensus_steps=schedule.steps,
        step_seconds=slowdown * step_seconds,
        step_bytes=round_bytes / schedule.steps,
    )


def predict_data_parallel(swarm: Swarm) -> Prediction:
    """Predict synchronous data parallelism, the baseline of all strategies.

    Every step waits for the slowest machine, and for the mean of all gradients. A ring all-reduce
    sends 2(n−1)/n · P each way in 2(n−1) messages (Patarasu and Yuan, 2009).
    """
    n = swarm.machines
    payload = swarm.parameters * GRADIENT_BITS / BITS_PER_BYTE
    sent = 2 * (n - 1) / n * payload
    rate = min(swarm.line.up_bytes, swarm.line.down_bytes)
    messages = 2 * (n - 1)
    seconds = (
        expected_maximum(swarm.step.mean_seconds, swarm.step.deviation_seconds, n)
        + sent / rate
        + messages * swarm.line.delay_seconds
    )
    return Prediction(swarm, DATA_PARALLEL, "ring, 32 bits", 1, 1, seconds, sent)


def predict_decentralized_adam(
    swarm: Swarm, topology: Topology, bits: int, interval: int = 1
) -> Prediction:
    """Predict `decentralized-adam` over a topology, with so many bits of a parameter as sent.

    Machines mix every `interval` steps. Without deviation a step takes max(t, k·P/u + ℓ). With
    deviation, machines also wait for slow neighbours, whose waits spread; that is simulated
    (`simulate_step_seconds`).
    """
    payload = swarm.parameters * bits / BITS_PER_BYTE
    neighbours = topology.most_neighbours(swarm.machines)
    slowest_way = max(1 / swarm.line.up_bytes, 1 / swarm.line.down_bytes)
    message_seconds = neighbours * payload * slowest_way + swarm.line.delay_seconds
    block_mean = interval * swarm.step.mean_seconds
    block_deviation = math.sqrt(interval) * swarm.step.deviation_seconds
    if swarm.machines == 1:
        block_seconds = block_mean
    elif block_deviation == 0:
        block_seconds = max(block_mean, message_seconds)
    else:
        relative = simulate_step_seconds(
            topology.name,
            min(swarm.machines, MAX_SIMULATED),
            round(block_deviation / block_mean, 3),
            round(message_seconds / block_mean, 3),
        )
        block_seconds = relative * block_mean
    return Prediction(
        swarm,
        DECENTRALIZED_ADAM,
        f"{topology.name}, {bits} bits",
        round_steps=interval,
        consensus_steps=interval * topology.consensus_steps(swarm.machines),
        step_seconds=block_seconds / interval,
        step_bytes=topology.mean_neighbours(swarm.machines) * payload / interval,
        topology=topology.name,
        bits=bits,
    )


@lru_cache(maxsize=4096)
def simulate_step_seconds(
    topology: str, machines: int, deviation: float, message_seconds: float
) -> float:
    """Simulate decentralised steps whose arithmetic takes 1 second on average.

    A machine begins step k+1 once its own step k and its neighbours' weights of step k are here;
    a neighbour sent them when it began step k.

    Args:
        topology: one of `TOPOLOGIES`.
        machines: how many take part.
        deviation: standard deviation of a step's arithmetic, in seconds.
        message_seconds: from the begin of a step until its weights have arrived.

    Returns:
        Mean seconds of a step in the long run; the same for the same arguments.
    """
    draw = random.Random(0)
    groups = TOPOLOGIES[topology].group_at
    begun = [0.0] * machines
    warmup = int(SIMULATED_STEPS * WARMUP_SHARE)
    warmed_up = 0.0
    for step in range(SIMULATED_STEPS):
        if step == warmup:
            warmed_up = fmean(begun)
        arrived = [time + message_seconds for time in begun]
        ended = [time + max(0.0, draw.gauss(1.0, deviation)) for time in begun]
        begun = [
            max(ended[i], *(arrived[j] for j in groups(machines, i, step) if j != i), 0.0)
            for i in range(machines)
        ]
    return (fmean(begun) - warmed_up) / (SIMULATED_STEPS - warmup)


def expected_maximum(mean: float, deviation: float, count: int) -> float:
    """Return the expected largest of `count` normal values, by numerical integration."""
    if count <= 1 or deviation == 0:
        return mean
    return mean + deviation * _standard_maximum(count)


@lru_cache(maxsize=256)
def _standard_maximum(count: int) -> float:
    """Integrate x dF(x)^count over the standard normal distribution F."""
    low, high, pieces = -8.0, 8.0, 4000
    width = (high - low) / pieces
    total = 0.0
    previous = 0.0
    for piece in range(1, pieces + 1):
        x = low + piece * width
        cumulated = (0.5 * (1 + math.erf(x / math.sqrt(2)))) ** count
        total += (x - width / 2) * (cumulated - previous)
        previous = cumulated
    return total


def choose_strategy(swarm: Swarm) -> Choice:
    """Choose what `strategy: auto` stands for.

    The sooner all machines learn of each other's steps, the more is learnt from each token. So of
    all candidates that train at least `CLOSE_ENOUGH` times the tokens per second of the fastest,
    that with the fewest steps to consensus is chosen, and of equal ones the most exact. A single
    machine uses `updates`. The baseline is predicted, and never chosen.
    """
    mixing = [
        predict_decentralized_adam(swarm, topology, bits)
        for topology in _possible_topologies(swarm.machines)
        for bits in MIXING_BITS
    ]
    baseline = predict_data_parallel(swarm)
    candidates = [*mixing, *_rarely_mixing(swarm), predict_updates(swarm)]
    candidates.sort(key=lambda each: each.consensus_steps)  # stable: more exact ones first
    predictions = (baseline, *candidates)
    if swarm.machines == 1:
        candidates = [each for each in candidates if each.strategy == UPDATES]
    fastest = max(each.tokens_per_second for each in candidates)
    chosen = next(each for each in candidates if each.tokens_per_second >= CLOSE_ENOUGH * fastest)
    gain = chosen.tokens_per_second / baseline.tokens_per_second
    return Choice(chosen, predictions, _explain(chosen, gain))


def _possible_topologies(machines: int) -> list[Topology]:
    return [each for each in TOPOLOGIES.values() if not each.describe_problem(machines)]


def _rarely_mixing(swarm: Swarm) -> list[Prediction]:
    """Predict decentralised Adam on the cheapest topology, mixing every 2, 4, 8, … steps."""
    topologies = _possible_topologies(swarm.machines)
    if not topologies:
        return []
    n = swarm.machines
    topology = min(topologies, key=lambda each: (each.most_neighbours(n), each.consensus_steps(n)))
    exponents = range(1, int(math.log2(MAX_INTERVAL)) + 1)
    return [
        predict_decentralized_adam(swarm, topology, MIXING_BITS[-1], 2**exponent)
        for exponent in exponents
    ]


def _explain(chosen: Prediction, gain: float) -> str:
    """Return one sentence with the numbers behind a choice."""
    share = f"machines compute {format_share(chosen.utilisation)} of the time"
    times = f"{gain:,.0f}" if gain >= 10 else f"{gain:.1f}"
    speed = f"{times} times the tokens per second of synchronous data parallelism"
    return f"{share[0].upper()}{share[1:]}; that is {speed}."
