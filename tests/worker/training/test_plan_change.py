"""Test that a worker plans with less RAM when other programs need it, and with more later."""

from dataclasses import replace

from example_hardware import cpu_machine

from barnraise.planning.limits import Limits
from barnraise.planning.memory_pressure import SMALLER, MemoryFacts
from barnraise.planning.write_advice import PlanRequest
from barnraise.spec import ModelSpec
from barnraise.training.memory_watch import MemoryWatch
from barnraise.training.plan_change import find_larger_plan, find_other_plan, find_smaller_plan

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


def test_plan_grows_within_the_owners_limits_once_memory_has_sufficed(caplog):
    machine = cpu_machine(cores=1, disk=8 << 30)
    request = PlanRequest(machine, DEEP, Limits(memory=6_500_000), step_sequences=8)
    small = request.make_plan()
    assert small.on_disk
    with caplog.at_level("INFO"):
        larger = find_larger_plan(request, small, Limits())
    assert larger is not None and not larger.on_disk
    assert "memory has sufficed for long" in caplog.text
    assert find_larger_plan(request, small, Limits(memory=6_500_000)) is None
    full = replace(machine, memory_available=1)
    assert find_larger_plan(replace(request, hardware=full), small, Limits()) is None


def test_watch_asks_for_a_smaller_plan_and_an_hour_later_for_a_larger_one():
    now = [0.0]
    facts = [SHORT]
    watch = MemoryWatch(Limits(), lambda: facts[0], lambda: now[0])
    for now[0] in (10.0, 20.0, 30.0):
        watch.poll()
    assert watch.pressure.is_short
    request = PlanRequest(cpu_machine(cores=1, disk=8 << 30), DEEP, Limits(), step_sequences=8)
    smaller = find_other_plan(request, request.make_plan(), watch)
    assert smaller is not None and watch.pressure.shortages == 1
    facts[0] = MemoryFacts(total=10**8, available=10**8)
    for now[0] in (40.0, 3600.0):
        watch.poll()
        assert not watch.pressure.is_short and not watch.pressure.may_grow
    now[0] = 3640.0
    watch.poll()
    assert watch.pressure.may_grow
    assert find_other_plan(request, smaller, watch) is not None
    now[0] = 9000.0
    watch.poll()
    assert not watch.pressure.may_grow
