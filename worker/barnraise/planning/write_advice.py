"""State what the daily limit of writes to disk costs a plan, and what would lift it. Pure."""

from dataclasses import dataclass, replace
from typing import Any

from barnraise.errors import PlanError
from barnraise.formats import format_bytes
from barnraise.planning.card_choice import CardChoice, choose_cards
from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import UNLIMITED, Limits
from barnraise.planning.plan import Plan
from barnraise.planning.search import WRITES_LIMIT
from barnraise.spec import ADAMW, ModelSpec

LARGER_STEPS = 8  # times as many sequences a step, as an example
WORTHWHILE = 1.1  # a change is named if training is faster by this factor with it


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is made for; see `make_plan`."""

    hardware: Hardware
    model: ModelSpec
    limits: Limits
    step_sequences: int
    optimizer: str = ADAMW

    def make_plan(self, advise: bool = False) -> Plan:
        """Find the fastest plan; with `advise` a refusal names the nearest changes that fit.

        Raises:
            PlanError: the model does not fit.
        """
        return self.choose_cards(advise).plan

    def choose_cards(self, advise: bool = False) -> CardChoice:
        """Find the fastest plan on one of the machine's cards or on several; see `make_plan`."""
        return choose_cards(
            self.hardware, self.model, self.limits, self.step_sequences, advise, self.optimizer
        )


def describe_write_limit(request: PlanRequest, plan: Plan) -> str:
    """Describe what the limit of writes costs a plan, and which options would train faster.

    Returns:
        Sentences, or "" if another resource limits the plan.
    """
    if plan.bottleneck != WRITES_LIMIT or plan.daily_write_limit is None:
        return ""
    limits = request.limits
    speed = plan.tokens_per_second
    changes: list[tuple[str, dict[str, Any]]] = [
        (
            "--disk-writes-per-day unlimited",
            {"limits": replace(limits, disk_writes_per_day=UNLIMITED)},
        )
    ]
    if limits.moments_bits == 32 and request.optimizer == ADAMW:
        changes.append(("--moments-8bit", {"limits": replace(limits, moments_bits=8)}))
    sequences = LARGER_STEPS * request.step_sequences
    changes.append((f"steps of {sequences} sequences", {"step_sequences": sequences}))
    ways: list[str] = []
    for name, change in changes:
        try:
            changed = replace(request, **change).make_plan()
        except PlanError:
            continue
        if changed.tokens_per_second >= WORTHWHILE * speed:
            ways.append(f"{name} ({_describe_speed(changed)})")
    daily = format_bytes(plan.daily_write_limit)
    problem = (
        f"Training pauses for a part of each day, so that the disk lasts for years: it may write "
        f"{daily} a day, which is enough for {_format_speed(speed)}."
    )
    return f"{problem} Faster: {'; '.join(ways)}." if ways else problem


def _describe_speed(plan: Plan) -> str:
    writes = "writes nothing"
    if plan.written_per_day:
        writes = f"writes {format_bytes(plan.written_per_day)} a day"
    return f"{_format_speed(plan.tokens_per_second)}, {writes}"


def _format_speed(tokens_per_second: float) -> str:
    digits = 0 if tokens_per_second >= 10 else 2
    return f"{tokens_per_second:,.{digits}f} tokens/s"
