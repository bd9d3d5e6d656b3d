"""Find another plan while a worker trains: a smaller one for other programs, or a larger one."""

import logging
from dataclasses import replace

from barnraise.errors import PlanError
from barnraise.formats import format_bytes
from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import Limits
from barnraise.planning.memory_pressure import MemoryFacts, smaller_budget
from barnraise.planning.plan import Plan
from barnraise.planning.write_advice import WORTHWHILE, PlanRequest
from barnraise.swap.hardware_probe import measure_free
from barnraise.training.memory_watch import MemoryWatch

log = logging.getLogger("barnraise")


def find_other_plan(request: PlanRequest, plan: Plan, watch: MemoryWatch) -> Plan | None:
    """Find the plan that a watch asks for, and report to it what became of that.

    Returns:
        None where there is no such plan: training goes on as before.
    """
    if watch.pressure.is_short:
        smaller = find_smaller_plan(request, plan, watch.pressure.facts)
        watch.on_shortage()
        return smaller
    larger = find_larger_plan(
        replace(request, hardware=measure_free(request.hardware)), plan, watch.limits
    )
    watch.on_growth(larger is not None)
    return larger


def find_larger_plan(request: PlanRequest, plan: Plan, limits: Limits) -> Plan | None:
    """Find a faster plan that uses more of the memory, and log what changes."""
    machine = _with_taken(request.hardware, plan)
    larger_request = replace(
        request,
        hardware=replace(
            machine, others=tuple(_with_taken(other, plan) for other in machine.others)
        ),
        limits=replace(request.limits, memory=limits.memory, device_memory=limits.device_memory),
    )
    try:
        larger = larger_request.make_plan()
    except PlanError as error:
        log.debug("no larger plan: %s", error)
        return None
    if larger.tokens_per_second < WORTHWHILE * plan.tokens_per_second:
        return None
    log.info(
        "memory has sufficed for long: training goes on with a plan that uses %s instead of %s",
        format_bytes(larger.host_bytes + larger.all_device_bytes),
        format_bytes(plan.host_bytes + plan.all_device_bytes),
    )
    return larger


def _with_taken(machine: Hardware, plan: Plan) -> Hardware:
    """Return a machine with what the plan takes of it now among what is free; 0: not known."""
    takes = dict(zip([share.name for share in plan.devices], plan.card_bytes, strict=True))
    takes = takes or dict.fromkeys(plan.ranks or (plan.device,), plan.device_bytes)
    available, free = machine.memory_available, machine.device_memory_free
    return replace(
        machine,
        memory_available=available + plan.host_bytes if available else 0,
        device_memory_free=free + takes.get(machine.device_name, 0) if free else 0,
    )


def find_smaller_plan(request: PlanRequest, plan: Plan, facts: MemoryFacts) -> Plan | None:
    """Find a plan that uses less RAM than the current one, and log what changes.

    Returns:
        None where no smaller plan fits the model: training goes on as before.
    """
    shortage = f"only {format_bytes(facts.available)} of memory are free"
    if facts.stalled is not None and facts.stalled >= 1:
        shortage += f", and programs wait for it {facts.stalled:.0f} % of the time"
    smaller_request = replace(
        request,
        # What was available at the start does not matter now: the budget is less than the plan.
        hardware=replace(request.hardware, memory_available=0),
        limits=replace(request.limits, memory=smaller_budget(plan.host_bytes, facts)),
    )
    try:
        smaller = smaller_request.make_plan()
    except PlanError as error:
        log.warning("%s, and there is no smaller plan: %s. Close other programs", shortage, error)
        return None
    log.warning(
        "%s: training goes on with a plan that uses %s instead of %s",
        shortage,
        format_bytes(smaller.host_bytes),
        format_bytes(plan.host_bytes),
    )
    return smaller
