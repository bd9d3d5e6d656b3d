"""Test that a worker plans with less RAM when other programs need it, or says why it cannot."""

from example_hardware import cpu_machine

from barnraise.planning.limits import Limits
from barnraise.planning.memory_pressure import SMALLER, MemoryFacts
from barnraise.planning.write_advice import PlanRequest
from barnraise.spec import ModelSpec
from barnraise.training.smaller_plan import find_smaller_plan

DEEP = ModelSpec(layers=6, width=64, heads=2, context=32, vocabulary=256)
SHALLOW = ModelSpec(layers=1, width=16, heads=1, context=16, vocabulary=256)
SHORT = MemoryFacts(total=10**8, available=3_900_000, stalled=12.0)


def test_smaller_plan_uses_less_and_is_stated_with_the_reason(caplog):
    request = PlanRequest(cpu_machine(cores=1, disk=8 << 30), DEEP, Limits(), step_sequences=8)
    plan = request.make_plan()
    smaller = find_smaller_plan(request, plan, SHORT)
    assert smaller is not None and smaller.host_bytes <= SMALLER * plan.host_bytes
    assert "only 3.9 MB of memory are free, and programs wait for it 12 % of the time" in (
        caplog.text
    )
    assert "training goes on with a plan that uses" in caplog.text


def test_model_without_a_smaller_plan_is_trained_as_before(caplog):
    request = PlanRequest(cpu_machine(cores=1, disk=8 << 30), SHALLOW, Limits(), step_sequences=8)
    assert find_smaller_plan(request, request.make_plan(), SHORT) is None
    assert "there is no smaller plan" in caplog.text and "Close other programs" in caplog.text
