"""Decide whether a machine may train now, by its owner's rules and what the machine is like. Pure.

A pause lasts at least `HOLD_SECONDS` after its cause was seen last, and a rule with a threshold
lets training go on only well below it. So no order of facts lets a machine pause and train more
often than once a minute.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from barnraise.planning.limits import Limits
from barnraise.planning.weekly_hours import parse_hours
from barnraise.protocol.enums import PauseReason
from barnraise.protocol.reports import PauseView

HOLD_SECONDS = 60.0
CPU_MARGIN = 10  # percentage points below a threshold at which a busy CPU counts as free again
HEAT_MARGIN = 5.0  # °C below the limit at which a hot machine counts as cool again


@dataclass(frozen=True)
class TrainingDecision:
    """Whether a machine may train, and why it pauses."""

    kind: PauseReason | None = None  # why not, for everybody who sees the run; None while it may
    reason: str = ""  # the same as a sentence for its owner; "" while it may
    # Seconds since 1970 before which it does not train again; None while it may, and in a pause
    # whose end is not known.
    until: float | None = None
    is_offline: bool = False  # whether it leaves its peers meanwhile

    @property
    def may_train(self) -> bool:
        """Return whether it may train."""
        return self.kind is None

    @property
    def view(self) -> PauseView | None:
        """Return it as reports state it."""
        return PauseView(reason=self.kind, until=self.until) if self.kind is not None else None


TRAIN = TrainingDecision()


@dataclass(frozen=True)
class Facts:
    """What a machine is like now. None: the system does not reveal it, or no rule needs it."""

    idle_seconds: float | None = None  # since somebody used keyboard or mouse
    on_battery: bool = False
    other_cpu: float | None = None  # percentage of all cores that other programs used lately
    programs: tuple[str, ...] = ()  # those of the rule `pause_for` that run
    celsius: float | None = None  # the highest temperature of CPU and GPU
    month_sent: int = 0  # bytes sent to peers in this calendar month
    last: TrainingDecision = TRAIN  # what was decided last under the same rules


def decide(limits: Limits, facts: Facts, now: datetime) -> TrainingDecision:
    """Decide whether a machine may train.

    Args:
        limits: its owner's rules.
        facts: what it is like.
        now: the time, in its local zone.
    """
    found = (rule(limits, facts, now) for rule in RULES)
    pause = next((decision for decision in found if decision is not None), None)
    last = facts.last
    is_held = last.until is not None and now.timestamp() < last.until
    if pause is None:
        return last if is_held else TRAIN
    if is_held and last.until is not None and pause.until is not None:
        return replace(pause, until=max(last.until, pause.until))
    return pause


def format_until(until: float, now: datetime) -> str:
    """Return seconds since 1970 as people say it: "19:00", "Mon 07:00" or "1 Dec 00:00"."""
    moment = datetime.fromtimestamp(until, now.tzinfo)
    clock = f"{moment:%H:%M}"
    if moment.date() == now.date():
        return clock
    if moment - now < timedelta(days=6):
        return f"{moment:%a} {clock}"
    return f"{moment.day} {moment:%b} {clock}"


def _pause(kind: PauseReason, reason: str, now: datetime, seconds: float = 0.0) -> TrainingDecision:
    """Return a pause that lasts so many seconds more, or `HOLD_SECONDS` if that is longer."""
    until = now.timestamp() + max(HOLD_SECONDS, seconds)
    return TrainingDecision(kind, f"paused: {reason}", until)


def _check_hours(limits: Limits, facts: Facts, now: datetime) -> TrainingDecision | None:
    hours = parse_hours(limits.hours) if limits.hours else None
    if hours is None or hours.contains(now):
        return None
    last = facts.last
    if last.kind is PauseReason.HOURS and last.until and now.timestamp() < last.until:
        return last  # the end of the same pause need not be looked for again
    opening = hours.next_change(now)
    assert opening is not None, "hours that can be written cover a minute of every week"
    until = opening.timestamp()
    reason = f"paused until {format_until(until, now)} by its hours"
    return TrainingDecision(PauseReason.HOURS, reason, until)


def _check_traffic(limits: Limits, facts: Facts, now: datetime) -> TrainingDecision | None:
    if limits.month_up is None or facts.month_sent < limits.month_up:
        return None
    next_month = (now.replace(day=1) + timedelta(days=32)).replace(
        day=1, hour=0, minute=0, second=0, microsecond=0
    )
    until = next_month.timestamp()
    reason = f"paused until {format_until(until, now)}: this month's upload is used up"
    return TrainingDecision(PauseReason.TRAFFIC, reason, until, is_offline=True)


def _check_battery(limits: Limits, facts: Facts, now: datetime) -> TrainingDecision | None:
    if limits.on_battery or not facts.on_battery:
        return None
    return _pause(PauseReason.BATTERY, "on battery", now)


def _check_programs(limits: Limits, facts: Facts, now: datetime) -> TrainingDecision | None:
    if not facts.programs:
        return None
    verb = "is" if len(facts.programs) == 1 else "are"
    return _pause(PauseReason.PROGRAM, f"{', '.join(facts.programs)} {verb} running", now)


def _check_idle(limits: Limits, facts: Facts, now: datetime) -> TrainingDecision | None:
    if limits.idle is None:
        return None
    if facts.idle_seconds is None:
        return _pause(PauseReason.IN_USE, "whether somebody uses it cannot be read", now)
    missing = 60 * limits.idle - facts.idle_seconds
    return _pause(PauseReason.IN_USE, "somebody uses it", now, missing) if missing > 0 else None


def _check_heat(limits: Limits, facts: Facts, now: datetime) -> TrainingDecision | None:
    if limits.max_temperature is None:
        return None
    if facts.celsius is None:
        return _pause(PauseReason.HOT, "its temperature cannot be read", now)
    was_hot = facts.last.kind is PauseReason.HOT
    if facts.celsius < limits.max_temperature - (HEAT_MARGIN if was_hot else 0.0):
        return None
    return _pause(PauseReason.HOT, f"{facts.celsius:.0f} °C are too hot", now)


def _check_cpu(limits: Limits, facts: Facts, now: datetime) -> TrainingDecision | None:
    if limits.busy_cpu is None or facts.other_cpu is None:
        return None
    threshold = limits.busy_cpu
    if facts.last.kind is PauseReason.BUSY:
        threshold = max(threshold - CPU_MARGIN, threshold / 2)
    if facts.other_cpu <= threshold:
        return None
    reason = f"other programs use {facts.other_cpu:.0f} % of the CPU"
    return _pause(PauseReason.BUSY, reason, now)


Rule = Callable[[Limits, Facts, datetime], TrainingDecision | None]
# The first that applies is what people are told: those that last longest come first.
RULES: tuple[Rule, ...] = (
    _check_traffic,
    _check_hours,
    _check_battery,
    _check_programs,
    _check_idle,
    _check_heat,
    _check_cpu,
)
