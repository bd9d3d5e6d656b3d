"""Say in words how a machine is: its version, its limits, and why its steps take longer. Pure."""

from typing import Any

from barnraise.formats import format_share
from barnraise.planning.limit_texts import describe_limit, is_limited
from barnraise.protocol.reports import LimitsView, SystemView

SMALL_DEVIATION = 0.15  # as a share of the predicted step
BUSY_SHARE = 0.1  # of all cores that other programs use from which they explain a slow step
FULL_SHARE = 0.92  # of memory in use from which the system may swap
HOT_CPU = 90.0  # °C from which processors slow down
HOT_GPU = 83.0
FAST_RATIO = 100  # a ratio that is written without decimals


def is_older(reported: str, newest: str) -> bool:
    """Return whether a machine's version is older than another one; False if one is unreadable."""
    before, after = _version_numbers(reported), _version_numbers(newest)
    return bool(before and after and before < after)


def _version_numbers(text: str) -> tuple[int, ...]:
    numbers = text.split("+")[0].split(".")
    return tuple(map(int, numbers)) if all(part.isdigit() for part in numbers) else ()


def describe_limits(limits: LimitsView | None) -> list[tuple[str, str]]:
    """Return the limits and rules that a machine's owner has set: (label, value)."""
    if limits is None:
        return []
    values = {name: getattr(limits, name) for name in type(limits).model_fields}
    rows = [describe_limit(name, value) for name, value in values.items() if is_limited(value)]
    return [(label[0].upper() + label[1:], text) for label, text in rows]


def explain_speed(
    plan: dict[str, Any] | None,
    measured: float | None,
    system: SystemView | None,
    last_report: str = "",
) -> str:
    """Say how a machine's steps compare with its plan, and the likely reason of a difference.

    What slowed a machine down that no longer reports may be over, so it is not listed.

    Args:
        plan: the last `reports.PlanView`.
        measured: seconds of a step.
        system: how busy the machine is.
        last_report: how long ago it last reported, such as "3 days ago"; "" while it reports.
    """
    predicted = plan["predicted_seconds"] if plan else 0.0
    if not predicted or measured is None:
        return "No step has been measured yet."
    steps = "Steps take"
    if last_report:
        steps = f"When the machine last reported, {last_report}, its steps took"
    ratio = measured / predicted
    if abs(ratio - 1) <= SMALL_DEVIATION:
        return f"{steps} as long as planned."
    if ratio < 1:
        return f"{steps} {round(100 * (1 - ratio))} % less time than planned."
    times = f"{ratio:.1f}" if ratio < FAST_RATIO else f"{ratio:.0f}"
    if last_report:
        return f"{steps} {times} times as long as planned."
    reasons = list_reasons(system)
    why = "; ".join(reasons) if reasons else "its load does not explain it"
    return f"{steps} {times} times as long as planned: {why}."


def list_reasons(system: SystemView | None) -> list[str]:
    """Return what may slow a machine down now, the most likely reason first."""
    if system is None:
        return ["the machine does not report its load"]
    reasons = []
    if system.cpu is not None and system.worker_cpu is not None:
        others = system.cpu - system.worker_cpu
        if others >= BUSY_SHARE:
            reasons.append(f"other programs take {format_share(others)} of this CPU")
    if system.memory_total and system.memory_used / system.memory_total >= FULL_SHARE:
        reasons.append("its memory is almost full, so the system may use the disk instead")
    if system.cpu_celsius is not None and system.cpu_celsius >= HOT_CPU:
        reasons.append(f"the CPU is at {system.cpu_celsius:.0f} °C and slows down")
    if system.gpu_celsius is not None and system.gpu_celsius >= HOT_GPU:
        reasons.append(f"the GPU is at {system.gpu_celsius:.0f} °C and slows down")
    return reasons
