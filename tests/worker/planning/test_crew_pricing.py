"""Crews of the machines that people have are dealt within what the planner computes for each."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from example_hardware import cpu_machine

from barnraise.cli.plan import PlanningOptions, assume_gpu
from barnraise.planning.crew import (
    CrewMachine,
    CrewPlan,
    CrewTask,
    SpanRequest,
    plan_crew,
)
from barnraise.planning.crew_pricing import StagePricer, describe_machine
from barnraise.planning.limits import Limits
from barnraise.planning.lines import HOME_LINE, Line
from barnraise.planning.plan import PipelineStage
from barnraise.planning.search import make_plan, make_stage_plan
from barnraise.planning.write_advice import PlanRequest
from barnraise.spec import preset

GB = 10**9
LAN = Line("LAN", 1000, 1000, 0.001)
HOST = cpu_machine(
    memory=16 * GB, disk=200 * GB, cores=8, stream=3e10, adam=9e8, disk_read=2e9, disk_write=1.2e9
)
PC = assume_gpu(HOST, PlanningOptions(gpu_tflops=25.0), 12 * GB)
MODEL = preset("gpt3-2.7b")
SEQUENCES = 8
IN_8_BITS = Limits(moments_bits=8)


# Tests share the prices of stages, as each one takes a plan.
pytestmark = pytest.mark.xdist_group("prices of stages")


@cache
def price_pc(limits: Limits) -> CrewMachine:
    """Return a PC with 16 GB of RAM and a 12-GB card, on GPT-3 2.7B."""
    return describe_machine("PC", LAN, PlanRequest(PC, MODEL, limits, SEQUENCES))


def crew(count: int, line: Line, limits: Limits) -> CrewPlan:
    """Return the plan of so many such PCs."""
    machines = [
        replace(price_pc(limits), name=f"PC {number}", line=line) for number in range(count)
    ]
    return plan_crew(machines, CrewTask(MODEL, SEQUENCES))


def test_four_weak_pcs_train_a_model_that_none_of_them_can():
    plan = crew(4, LAN, IN_8_BITS)
    assert max(plan.alone) < 20 and plan.pays
    assert plan.tokens_per_second > 1_500
    assert "disk" not in plan.deal.bottleneck[1]


def test_home_lines_limit_a_crew_to_what_they_carry():
    plan = crew(4, HOME_LINE, IN_8_BITS)
    most = HOME_LINE.up_bytes / (2 * MODEL.width)  # 366 tokens/s in 8 bits
    assert 0.7 * most < plan.tokens_per_second < most
    assert plan.deal.boundary_bits == 8 and plan.deal.bottleneck[1] == "line"


def test_one_more_block_than_fits_is_a_hundred_times_slower():
    pricer = price_pc(IN_8_BITS).price
    prices = [pricer(SpanRequest(blocks, False, 1, SEQUENCES)) for blocks in range(1, 16)]
    jumps = [after.step_seconds / before.step_seconds for before, after in pairwise(prices)]
    assert max(jumps) > 20
    plan = crew(3, LAN, IN_8_BITS)
    cliff = jumps.index(max(jumps)) + 1
    assert max(plan.deal.counts.values()) <= cliff


def test_price_is_that_of_the_stages_own_plan():
    request = PlanRequest(PC, MODEL, Limits(), SEQUENCES)
    price = price_pc(Limits()).price(SpanRequest(3, True, 1, SEQUENCES))
    stage = PipelineStage((0, 1, 2, 3, MODEL.layers + 1), 1)
    plan = make_stage_plan(PC, MODEL, stage, Limits(), SEQUENCES)
    assert price.step_seconds == plan.step_seconds and price.host_bytes == plan.host_bytes
    assert price.groups == len(plan.forward_groups)
    alone = price_pc(Limits()).alone
    whole = make_plan(PC, MODEL, Limits(), SEQUENCES)
    assert alone.step_seconds == pytest.approx(whole.step_seconds)
    tiny = StagePricer(replace(request, limits=Limits(memory=1, disk=0)))
    assert tiny(SpanRequest(1, False, 1, SEQUENCES)) is None
