"""Deal a model's blocks to the machines of a crew, which trains as one pipeline. Pure.

The lead holds both ends (embedding, final norm, head) and the first blocks; every other member
holds a *span* of the blocks that follow. Activations pass from member to member and back to the
lead, gradients in the other direction: the pipeline is a ring (Ryabinin et al., arXiv 2301.11913,
without replicated stages; the order of GPipe, arXiv 1811.06965).

With M micro-batches a step lasts

    Σ (f_i + l_i) + (M − 1) · max(p_i, l_i) + 2 Σ r_i

where stage i ends its first micro-batch after f_i seconds (`Stage.filling`) and each further one
after p_i (`Stage.pace`), a micro-batch occupies its line for l_i (`Stage.link_seconds`), and r_i is
its line's round trip. The first sum fills and drains the pipeline, the last one is the delay of a
ring in both directions. `price_deal` computes it. Every span is priced as a whole, because a
machine whose state leaves its memory is slower by a factor of a hundred: no speed a block shows it.

Machines that this leaves out may become further holders of a span, which share its micro-batches:
the speeds of a span's holders add up, and `share_spans` says where that pays.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Annotated

from pydantic import Field, FiniteFloat

from barnraise.errors import PlanError
from barnraise.formats import format_bytes
from barnraise.planning.lines import BITS_PER_BYTE, Line
from barnraise.protocol.types import Count, ShortText
from barnraise.spec import ModelSpec
from barnraise.spec.architecture import FP32_BYTES

MAX_MEMBERS = 16
LEAST_MICRO_BATCHES = 4  # for each member, so that the pipeline is full for most of a step
BOUNDARY_BITS = (32, 16, 8)  # of an element that crosses a boundary, the exact ones first
EXACT_BOUNDARY_COSTS = 1.05  # fewer bits are chosen only if they make a step shorter by this factor
ROUND_STEPS = 30  # assumed, after which the holders of a span merge their replicas
SHARING_GAIN = 1.05  # by which a step must become shorter for another holder of a span
PARAMETER_STATE_BYTES = 24  # a parameter, to train it with AdamW and exchange its updates


@dataclass(frozen=True)
class SpanRequest:
    """What one member would compute in each step.

    Attributes:
        blocks: how many.
        has_ends: whether it holds the embedding, the final norm and the head as well.
        sequences: of a micro-batch.
        micro_batches: of a step.
    """

    blocks: int
    has_ends: bool
    sequences: int
    micro_batches: int


@dataclass(frozen=True)
class SpanPrice:
    """What a span costs one machine, as its planner predicts; bounded, because it travels.

    Attributes:
        step_seconds: in which it computes all micro-batches of a step, without the network.
        groups: of blocks that all micro-batches pass before the next group is touched.
        bottleneck: the busiest resource; see `Plan.bottleneck`.
        host_bytes: of RAM.
        device_bytes: of the memory of its GPUs.
        disk_bytes: of disk.
    """

    step_seconds: Annotated[FiniteFloat, Field(gt=0, lt=1e9)]
    groups: Annotated[int, Field(ge=1, le=256)] = 1
    bottleneck: ShortText = "compute"
    host_bytes: Count = 0
    device_bytes: Count = 0
    disk_bytes: Count = 0


# Returns what a span costs a machine; None if it does not fit. A longer span never takes less time.
Pricer = Callable[[SpanRequest], SpanPrice | None]


@dataclass(frozen=True)
class CrewMachine:
    """A machine that could be a member of a crew.

    Attributes:
        name: as people read it.
        line: between it and the others.
        price: prices spans on it.
        alone: what a step of the whole model costs it alone; None if the model does not fit.
    """

    name: str
    line: Line
    price: Pricer
    alone: SpanPrice | None = None


@dataclass(frozen=True)
class Stage:
    """What one member of a deal does.

    Attributes:
        machine: its index among the machines.
        first_block: the index of its first block; blocks count from 1.
        blocks: how many it holds.
        price: what they cost it.
        pace: seconds from the end of one micro-batch to that of the next.
        link_seconds: for which a micro-batch's boundaries occupy its line.
        delay_seconds: a round trip on its line.
    """

    machine: int
    first_block: int
    blocks: int
    price: SpanPrice
    pace: float
    link_seconds: float
    delay_seconds: float

    @property
    def filling(self) -> float:
        """Return the seconds until its first micro-batch is done.

        All micro-batches pass each group of blocks but the last before that.
        """
        return self.price.step_seconds * (1 - 1 / self.price.groups) + self.pace

    @property
    def slowest(self) -> float:
        """Return the seconds a micro-batch of what is slower: its machine or its line."""
        return max(self.pace, self.link_seconds)


@dataclass(frozen=True)
class Deal:
    """Which member holds which blocks, and how long a step takes.

    Attributes:
        stages: the lead's first, in the order of the blocks; the holders of one span follow each
            other.
        sequences: of a micro-batch.
        micro_batches: of a step.
        boundary_bits: of an element that crosses a boundary.
        step_seconds: predicted.
    """

    stages: tuple[Stage, ...]
    sequences: int
    micro_batches: int
    boundary_bits: int
    step_seconds: float

    @property
    def counts(self) -> dict[int, int]:
        """Map the index of each machine that takes part → how many blocks it holds."""
        return {stage.machine: stage.blocks for stage in self.stages}

    @property
    def spans(self) -> list[list[Stage]]:
        """Return the stages by the span that their machines hold."""
        return [list(span) for _, span in groupby(self.stages, lambda stage: stage.first_block)]

    @property
    def bottleneck(self) -> tuple[Stage, str]:
        """Return the stage that all others wait for, and "line" or what limits its machine."""
        stage = max(self.spans, key=_span_pace)[0]
        return stage, "line" if stage.link_seconds > stage.pace else stage.price.bottleneck


def price_deal(stages: Sequence[Stage], micro_batches: int) -> float:
    """Return the seconds of a step; the module's docstring has the formula."""
    return _price_spans([[stage] for stage in stages], micro_batches)


def _price_spans(spans: Sequence[Sequence[Stage]], micro_batches: int) -> float:
    filling = sum(max(map(_filling_seconds, span)) for span in spans)
    return filling + (micro_batches - 1) * max(map(_span_pace, spans))


def _span_pace(span: Sequence[Stage]) -> float:
    """Return the seconds a micro-batch of a span: the speeds of its holders add up."""
    return span[0].slowest if len(span) == 1 else 1 / sum(1 / stage.slowest for stage in span)


def _filling_seconds(stage: Stage) -> float:
    """Return by how much a stage delays the first micro-batch on its way around the ring."""
    return stage.filling + stage.link_seconds + 2 * stage.delay_seconds


@dataclass(frozen=True)
class _Partial:
    """A deal of the first blocks to the first machines."""

    stages: tuple[Stage, ...]
    slowest: float  # seconds a micro-batch
    filling: float  # seconds, with the delays

    @property
    def costs(self) -> tuple[float, float, int]:
        return self.slowest, self.filling, len(self.stages)


@dataclass(frozen=True)
class PipelineShape:
    """How a step passes the pipeline.

    Attributes:
        model: whose blocks are dealt.
        sequences: of a micro-batch.
        micro_batches: of a step.
        boundary_bits: of an element that crosses a boundary.
    """

    model: ModelSpec
    sequences: int
    micro_batches: int
    boundary_bits: int

    @property
    def most_members(self) -> int:
        """Return how many members these micro-batches are enough for."""
        if self.sequences == 1:
            # Micro-batches cannot be smaller, so that a step cannot have more of them.
            return MAX_MEMBERS
        return self.micro_batches // LEAST_MICRO_BATCHES

    def lay_stage(
        self, machine: CrewMachine, index: int, first_block: int, blocks: int
    ) -> Stage | None:
        """Return a machine's stage; None if the span does not fit it."""
        request = SpanRequest(blocks, index == 0, self.sequences, self.micro_batches)
        price = machine.price(request)
        if price is None:
            return None
        return Stage(
            machine=index,
            first_block=first_block,
            blocks=blocks,
            price=price,
            pace=price.step_seconds / (price.groups * self.micro_batches),
            link_seconds=self.link_seconds(machine.line),
            delay_seconds=machine.line.round_trip_seconds,
        )

    def close_deal(self, stages: Sequence[Stage]) -> Deal:
        """Return the deal of stages that follow each other from the first block on."""
        numbered: list[Stage] = []
        first_block = 1
        for stage in stages:
            numbered.append(replace(stage, first_block=first_block))
            first_block += stage.blocks
        step_seconds = price_deal(stages, self.micro_batches)
        return Deal(
            tuple(numbered), self.sequences, self.micro_batches, self.boundary_bits, step_seconds
        )

    def link_seconds(self, line: Line) -> float:
        """Return the seconds for which a micro-batch's boundaries occupy a member's line.

        In one direction of the ring it sends activations and in the other one gradients, d elements
        a token each, and it receives as many.
        """
        tokens = self.sequences * self.model.context
        size = 2 * tokens * self.model.width * self.boundary_bits / BITS_PER_BYTE
        return size / min(line.up_bytes, line.down_bytes)


def deal_blocks(
    machines: Sequence[CrewMachine], shape: PipelineShape, longest: float = math.inf
) -> Deal | None:
    """Find the deal with the shortest step, by a dynamic program over machines and blocks.

    Two costs of a deal of the first blocks count for what follows: its slowest stage, and the sum
    that fills the pipeline. The program stores, for each number of blocks, every partial deal that
    no other one beats in both. Machines but the lead may be left out.

    Args:
        machines: the lead first.
        shape: how a step passes the pipeline.
        longest: seconds; deals with longer steps are not wanted.

    Returns:
        The best deal among at least two machines; None if there is none.
    """
    layers = shape.model.layers
    partial = {0: [_Partial((), 0.0, 0.0)]}
    for index, machine in enumerate(machines):
        stages = _list_stages(machine, index, shape, longest)
        following: dict[int, list[_Partial]] = {}
        if index > 0:  # left out
            following = {dealt: list(ways) for dealt, ways in partial.items()}
        for dealt, ways in partial.items():
            wanted = [way for way in ways if len(way.stages) < shape.most_members]
            for stage in stages[: layers - dealt]:
                extended = [_extend(way, stage) for way in wanted]
                following.setdefault(dealt + stage.blocks, []).extend(extended)
        partial = {dealt: _drop_beaten(ways) for dealt, ways in following.items()}
    best = min(
        partial.get(layers, []),
        key=lambda way: price_deal(way.stages, shape.micro_batches),
        default=None,
    )
    return None if best is None else shape.close_deal(best.stages)


def _list_stages(
    machine: CrewMachine, index: int, shape: PipelineShape, longest: float
) -> list[Stage]:
    """List a machine's stages of one block, two blocks and so on, as far as they are wanted."""
    stages: list[Stage] = []
    most = shape.model.layers - (index == 0)  # a lead alone is no crew
    for blocks in range(1, most + 1):
        stage = shape.lay_stage(machine, index, 1, blocks)
        if stage is None or stage.price.step_seconds > longest:
            break
        stages.append(stage)
    return stages


def _extend(way: _Partial, stage: Stage) -> _Partial:
    return _Partial(
        (*way.stages, stage),
        max(way.slowest, stage.slowest),
        way.filling + _filling_seconds(stage),
    )


def _drop_beaten(ways: list[_Partial]) -> list[_Partial]:
    """Return the partial deals that no other one equals or beats in all costs.

    They come in the order of the first cost, so that only the two others must be compared.
    """
    best: list[_Partial] = []
    for way in sorted(ways, key=lambda way: way.costs):
        members = len(way.stages)
        if not any(o.filling <= way.filling and len(o.stages) <= members for o in best):
            best.append(way)
    return best


def share_spans(machines: Sequence[CrewMachine], shape: PipelineShape, deal: Deal) -> Deal:
    """Make machines that a deal leaves out holders of its spans, where a step becomes shorter.

    Each of them joins the span where that gains most. A step is then longer by its part of the
    exchange of replicas at a round's end.
    """
    for index, machine in enumerate(machines):
        if index in deal.counts or len(deal.stages) == MAX_MEMBERS:
            continue
        ways: list[Deal] = []
        for place, span in enumerate(deal.spans):
            stage = shape.lay_stage(machine, index, span[0].first_block, span[0].blocks)
            if place > 0 and stage is not None:
                spans = [*deal.spans[:place], [*span, stage], *deal.spans[place + 1 :]]
                seconds = _price_spans(spans, shape.micro_batches)
                seconds += sum(_merge_seconds(each, machines, shape) for each in spans)
                stages = tuple(stage for each in spans for stage in each)
                ways.append(replace(deal, stages=stages, step_seconds=seconds))
        best = min(ways, key=lambda way: way.step_seconds, default=deal)
        if SHARING_GAIN * best.step_seconds <= deal.step_seconds:
            deal = best
    return deal


def _merge_seconds(
    span: Sequence[Stage], machines: Sequence[CrewMachine], shape: PipelineShape
) -> float:
    """Return a step's part of the exchange of a span's replicas, which all pass the lead's line."""
    if len(span) == 1:
        return 0.0
    parameters = span[0].blocks * shape.model.fragments()[1].size
    line = machines[0].line
    size = len(span) * FP32_BYTES * parameters
    return (size / line.up_bytes + size / line.down_bytes) / ROUND_STEPS


@dataclass(frozen=True)
class CrewTask:
    """What a crew would train.

    Attributes:
        model: the run's.
        step_sequences: of a step of the run's recipe.
        boundary_bits: 32, 16 or 8; None to choose by the lines.
    """

    model: ModelSpec
    step_sequences: int
    boundary_bits: int | None = None

    def __post_init__(self) -> None:
        if self.boundary_bits not in (None, *BOUNDARY_BITS):
            raise PlanError(
                f"a boundary of {self.boundary_bits} bits is impossible; state 32, 16 or 8"
            )

    @property
    def step_tokens(self) -> int:
        """Return the tokens of a step."""
        return self.step_sequences * self.model.context


@dataclass(frozen=True)
class CrewPlan:
    """How machines would train a model as one crew, and each alone.

    Attributes:
        task: what they train.
        machines: the lead first.
        deal: the fastest.
    """

    task: CrewTask
    machines: tuple[CrewMachine, ...]
    deal: Deal

    @property
    def tokens_per_second(self) -> float:
        """Return the crew's predicted speed."""
        return self.task.step_tokens / self.deal.step_seconds

    @property
    def alone(self) -> list[float]:
        """Return the tokens/s of each machine alone; 0 where the model does not fit."""
        tokens = self.task.step_tokens
        prices = (machine.alone for machine in self.machines)
        return [tokens / price.step_seconds if price else 0.0 for price in prices]

    @property
    def pays(self) -> bool:
        """Whether the crew is faster than its machines are apart, each as a volunteer."""
        return self.tokens_per_second > sum(self.alone)

    @property
    def left_out(self) -> list[int]:
        """Return the indices of the machines with which the crew would be slower."""
        return [i for i in range(len(self.machines)) if i not in self.deal.counts]

    @property
    def reason(self) -> str:
        """Say in one sentence whether to form the crew, and why."""
        crew, apart = self.tokens_per_second, sum(self.alone)
        stage, limit = self.deal.bottleneck
        name = self.machines[stage.machine].name
        what = f"the line of {name}" if limit == "line" else f"{name} ({limit})"
        fitting = sum(speed > 0 for speed in self.alone)
        if not fitting:
            return (
                f"Form the crew: none of these machines can train the model alone; together they "
                f"make {_speed(crew)}, limited by {what}."
            )
        if self.pays:
            return (
                f"Form the crew: {_speed(crew)} instead of {_speed(apart)} apart, because each "
                f"span fits its machine's memory; limited by {what}."
            )
        return (
            f"Train apart: {_speed(apart)} instead of {_speed(crew)} as a crew, which waits for "
            f"{what} and is idle while its pipeline fills and drains."
        )


def _speed(tokens_per_second: float) -> str:
    digits = 0 if tokens_per_second >= 10 else 1
    return f"{tokens_per_second:,.{digits}f} tokens/s"


def plan_crew(machines: Sequence[CrewMachine], task: CrewTask) -> CrewPlan:
    """Find the fastest deal over micro-batches and, unless the task states them, boundary bits.

    Args:
        machines: the lead first.
        task: what they train.

    Raises:
        PlanError: The machines are too few, too many, or cannot hold the model together.
    """
    if len(machines) > MAX_MEMBERS:
        raise PlanError(
            f"a crew has 2 to {MAX_MEMBERS} machines, and these are {len(machines)}; "
            "further machines train alone or form another crew"
        )
    bits = BOUNDARY_BITS if task.boundary_bits is None else (task.boundary_bits,)
    deals = [deal for each in bits if (deal := _find_deal(machines, task, each)) is not None]
    if not deals:
        raise PlanError(_describe_refusal(machines, task))
    shortest = min(deal.step_seconds for deal in deals)
    chosen = next(deal for deal in deals if deal.step_seconds <= EXACT_BOUNDARY_COSTS * shortest)
    return CrewPlan(task, tuple(machines), chosen)


def _find_deal(machines: Sequence[CrewMachine], task: CrewTask, bits: int) -> Deal | None:
    """Return the fastest deal over all sizes of micro-batches that are small enough."""
    best: Deal | None = None
    longest = math.inf  # without shared spans
    for sequences in micro_batch_sizes(task.step_sequences):
        shape = PipelineShape(task.model, sequences, task.step_sequences // sequences, bits)
        deal = deal_blocks(machines, shape, longest)
        if deal is None:
            continue
        longest = min(longest, deal.step_seconds)
        deal = share_spans(machines, shape, deal)
        if best is None or deal.step_seconds < best.step_seconds:
            best = deal
    return best


def micro_batch_sizes(step_sequences: int) -> list[int]:
    """Return the sizes of micro-batches, in sequences, such that a step has enough for two members.

    Where a step is too short for that, only a single sequence is small enough.
    """
    sizes = [size for size in range(step_sequences, 0, -1) if step_sequences % size == 0]
    least = 2 * LEAST_MICRO_BATCHES
    return [size for size in sizes if size == 1 or step_sequences // size >= least]


# ---- refusals ----


def advise_crew(run: str) -> str:
    """Return the advice for a machine that is too weak to train a run alone."""
    return (
        f"Several machines can train it together: `barnraise join {run} --crew` starts a crew, and "
        "`barnraise plan --crew` shows what it would reach"
    )


def _describe_refusal(machines: Sequence[CrewMachine], task: CrewTask) -> str:
    """Explain why the machines cannot hold the model: too little memory, or no room for the ends.

    The smallest micro-batch decides, because it takes the least memory.
    """
    shape = PipelineShape(task.model, 1, task.step_sequences, BOUNDARY_BITS[-1])
    capable = [m.name for m in machines if _fits(m, shape, has_ends=True, blocks=1)]
    if not capable:
        table = format_bytes(PARAMETER_STATE_BYTES * task.model.vocabulary * task.model.width)
        return (
            "none of these machines can hold the embedding, the head and one block, which only a "
            f"crew's lead does: about {table} of memory for the table of tokens alone; add a "
            "machine with more memory as the lead"
        )
    if machines[0].name not in capable:
        return (
            f"{machines[0].name} cannot hold the embedding, the head and one block, as a crew's "
            f"lead does; {capable[0]} can: start the crew there"
        )
    room = [
        _count_blocks(machine, shape, has_ends=index == 0) for index, machine in enumerate(machines)
    ]
    missing = task.model.layers - sum(room)
    if missing <= 0:
        return (
            f"of these machines only {machines[0].name} has room for blocks of this model: it "
            "trains alone"
        )
    block_bytes = PARAMETER_STATE_BYTES * task.model.fragments()[1].size
    return (
        f"these machines have room for {sum(room)} of the model's {task.model.layers} blocks: the "
        f"crew needs about {format_bytes(missing * block_bytes)} more memory in all, or "
        "Adam's moments in 8 bits (--moments-8bit)"
    )


def _fits(machine: CrewMachine, shape: PipelineShape, has_ends: bool, blocks: int) -> bool:
    request = SpanRequest(blocks, has_ends, shape.sequences, shape.micro_batches)
    return machine.price(request) is not None


def _count_blocks(machine: CrewMachine, shape: PipelineShape, has_ends: bool) -> int:
    """Return the most blocks that fit a machine."""
    low, high = 0, shape.model.layers
    while low < high:
        middle = (low + high + 1) // 2
        if _fits(machine, shape, has_ends, middle):
            low = middle
        else:
            high = middle - 1
    return low
