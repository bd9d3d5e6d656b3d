"""A crew's blocks are dealt as fast as any deal could be, and refusals say what is missing."""

import math
from dataclasses import dataclass, replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.errors import PlanError
from barnraise.planning.crew import (
    CrewMachine,
    CrewTask,
    PipelineShape,
    SpanPrice,
    SpanRequest,
    deal_blocks,
    micro_batch_sizes,
    plan_crew,
    price_deal,
)
from barnraise.planning.lines import CLUSTER_LINE, HOME_LINE, Line
from barnraise.spec import preset

NANO = preset("gpt-nano")


@dataclass(frozen=True)
class Span:
    """How a machine of these tests computes: beyond its cliff a block takes 100 times as long."""

    room: int = 1000
    cliff: int = 1000
    ends: float = 0.0  # seconds; infinite if it cannot hold them
    groups: int = 1


def machine(
    seconds: float,
    line: Line = CLUSTER_LINE,
    span: Span = Span(),
    alone: float | None = None,
) -> CrewMachine:
    """Return a machine that takes so many seconds a block and step."""

    def price(request: SpanRequest) -> SpanPrice | None:
        if request.blocks > span.room or (request.has_ends and math.isinf(span.ends)):
            return None
        step = seconds * request.blocks * (100 if request.blocks > span.cliff else 1)
        ends = span.ends if request.has_ends else 0.0
        return SpanPrice(step + ends, min(span.groups, request.blocks))

    return CrewMachine(f"{seconds:g}", line, price, SpanPrice(alone) if alone else None)


def best_by_brute_force(machines: list[CrewMachine], shape: PipelineShape) -> float:
    """Return the shortest step over all deals."""
    layers = shape.model.layers
    best = math.inf
    for counts in product(range(layers + 1), repeat=len(machines)):
        stages = []
        for index, count in enumerate(counts):
            if count:
                stages.append(shape.lay_stage(machines[index], index, 1, count))
        is_deal = counts[0] > 0 and sum(counts) == layers and None not in stages
        if is_deal and 1 < len(stages) <= shape.most_members:
            best = min(best, price_deal(stages, shape.micro_batches))
    return best


machines_strategy = st.lists(
    st.builds(
        machine,
        seconds=st.floats(0.1, 10),
        line=st.builds(Line, st.just("line"), st.floats(1, 1000), st.floats(1, 1000)),
        span=st.builds(
            Span,
            room=st.integers(0, 7),
            cliff=st.integers(1, 7),
            ends=st.sampled_from((0.0, 1.0, math.inf)),
            groups=st.integers(1, 2),
        ),
    ),
    min_size=2,
    max_size=4,
)


@settings(max_examples=150)
@given(
    machines=machines_strategy,
    layers=st.integers(2, 7),
    sequences=st.integers(1, 2),
    micro_batches=st.sampled_from((8, 12, 16)),
    bits=st.sampled_from((8, 16, 32)),
)
def test_deal_is_as_fast_as_the_best_of_all_deals(machines, layers, sequences, micro_batches, bits):
    shape = PipelineShape(replace(NANO, layers=layers), sequences, micro_batches, bits)
    best = best_by_brute_force(machines, shape)
    deal = deal_blocks(machines, shape)
    if deal is None:
        assert math.isinf(best)
        return
    assert deal.step_seconds == pytest.approx(best, rel=1e-9)
    assert deal.step_seconds == pytest.approx(price_deal(deal.stages, micro_batches))
    # The spans follow each other, and the lead holds the first one.
    assert deal.stages[0].machine == 0
    following = 1
    for stage in deal.stages:
        assert stage.first_block == following
        following += stage.blocks
    assert following == layers + 1


@given(machines=machines_strategy, step_sequences=st.integers(1, 48))
def test_each_member_has_four_micro_batches_or_one_sequence(machines, step_sequences):
    task = CrewTask(replace(NANO, layers=4), step_sequences)
    try:
        deal = plan_crew(machines, task).deal
    except PlanError:
        return
    assert deal.sequences * deal.micro_batches == step_sequences
    assert deal.sequences == 1 or deal.micro_batches >= 4 * len(deal.spans)


def test_one_stage_without_a_line_takes_its_own_time():
    shape = PipelineShape(NANO, 1, 8, 32)
    for groups in (1, 2, 4):
        priced = machine(2.0, line=Line("fast", 1e9, 1e9), span=Span(groups=groups))
        stage = shape.lay_stage(priced, 0, 1, 4)
        assert price_deal([stage], 8) == pytest.approx(8.0, rel=1e-3)


def test_two_equal_stages_reach_the_ideal_of_sixteen_micro_batches():
    shape = PipelineShape(NANO, 1, 16, 32)
    pair = [machine(1.0, line=Line("fast", 1e9, 1e9))] * 2
    deal = deal_blocks(pair, shape)
    assert deal.counts == {0: 2, 1: 2}
    assert 4.0 / (2 * deal.step_seconds) == pytest.approx(16 / 17, rel=1e-3)


def test_span_that_falls_off_the_cliff_is_not_dealt():
    model = replace(NANO, layers=12)
    machines = [
        machine(1.0, span=Span(ends=0.5, cliff=3)),
        machine(1.0, span=Span(cliff=5)),
        machine(2.0),
    ]
    deal = plan_crew(machines, CrewTask(model, 32)).deal
    assert deal.counts == {0: 3, 1: 5, 2: 4}


def test_machine_that_would_slow_the_crew_down_is_left_out():
    crew = plan_crew([machine(1.0), machine(1.0), machine(500.0)], CrewTask(NANO, 16))
    assert crew.left_out == [2] and set(crew.deal.counts) == {0, 1}


def test_machine_without_blocks_of_its_own_shares_the_slowest_span():
    task = CrewTask(replace(NANO, layers=2), 16)
    pair = plan_crew([machine(1.0), machine(3.0)], task).deal
    shared = plan_crew([machine(1.0), machine(3.0), machine(3.0)], task).deal
    assert [[stage.machine for stage in span] for span in shared.spans] == [[0], [1, 2]]
    assert shared.step_seconds == pytest.approx(pair.step_seconds - 15 * 1.5 / 16, rel=0.02)
    assert shared.bottleneck[0].machine == 1


def test_span_is_not_shared_where_merging_its_replicas_takes_longer():
    task = CrewTask(replace(NANO, layers=2), 16)
    slow = [machine(seconds, line=HOME_LINE) for seconds in (0.1, 0.3, 0.3)]
    assert plan_crew(slow, task).left_out == [2]
    full = [machine(1.0)] * 2 + [machine(1.0, span=Span(room=0))]
    assert plan_crew(full, task).left_out == [2]


def test_boundary_has_fewer_bits_only_where_the_line_limits():
    fast = plan_crew([machine(1.0)] * 2, CrewTask(NANO, 16))
    assert fast.deal.boundary_bits == 32
    slow = plan_crew([machine(1e-4, line=HOME_LINE)] * 2, CrewTask(NANO, 16))
    assert slow.deal.boundary_bits == 8 and slow.deal.bottleneck[1] == "line"
    exact = plan_crew([machine(1e-4, line=HOME_LINE)] * 2, CrewTask(NANO, 16, boundary_bits=32))
    assert exact.deal.boundary_bits == 32
    assert exact.deal.step_seconds > 3 * slow.deal.step_seconds
    with pytest.raises(PlanError, match="12 bits is impossible"):
        CrewTask(NANO, 16, boundary_bits=12)


def test_reason_says_whether_to_form_the_crew():
    task = CrewTask(NANO, 16)
    together = plan_crew([machine(1.0)] * 2, task)
    assert together.pays and together.reason.startswith("Form the crew: none of these machines")
    weak = plan_crew([machine(1.0, alone=100.0)] * 2, task)
    assert weak.pays and "apart, because each span fits its machine's memory" in weak.reason
    strong = plan_crew([machine(1.0, alone=4.0)] * 2, task)
    assert not strong.pays and strong.reason.startswith("Train apart:")
    assert strong.alone == [pytest.approx(16 * NANO.context / 4.0)] * 2


def test_too_many_machines_are_refused():
    with pytest.raises(PlanError, match="2 to 16 machines, and these are 17"):
        plan_crew([machine(1.0)] * 17, CrewTask(NANO, 8))
    with pytest.raises(PlanError, match="only 1 has room for blocks of this model: it trains"):
        plan_crew([machine(1.0)], CrewTask(NANO, 8))


def test_refusal_says_how_much_memory_is_missing():
    with pytest.raises(PlanError, match=r"room for 3 of the model's 4 blocks: .* more memory"):
        plan_crew([machine(1.0, span=Span(1)), machine(1.0, span=Span(2))], CrewTask(NANO, 8))


def test_refusal_names_a_machine_that_can_lead():
    able, unable = machine(1.0), machine(2.0, span=Span(ends=math.inf))
    with pytest.raises(PlanError, match=r"2 cannot hold the embedding.*; 1 can: start the crew"):
        plan_crew([unable, able], CrewTask(NANO, 8))
    with pytest.raises(PlanError, match="none of these machines can hold the embedding"):
        plan_crew([unable, unable], CrewTask(NANO, 8))


def test_micro_batches_are_enough_for_two_members():
    assert micro_batch_sizes(32) == [4, 2, 1]
    assert micro_batch_sizes(6) == [1]
