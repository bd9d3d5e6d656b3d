"""Find a plan that leaves more RAM to other programs while a worker trains."""

import logging
from dataclasses import replace

from barnraise.errors import PlanError
from barnraise.formats import format_bytes
from barnraise.planning.memory_pressure import MemoryFacts, smaller_budget
from barnraise.planning.plan import Plan
from barnraise.planning.write_advice import PlanRequest

log = logging.getLogger("barnraise")


def find_smaller_plan(request: PlanRequest, plan: Plan, facts: MemoryFacts) -> Plan | None:
    """Find a plan that uses less RAM than the current one, and log what changes.

    Args:
        request: what the current plan was made for.
        plan: the current plan.
        facts: of the memory, measured while the plan uses it.

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
