"""Choose what a machine pauses for, and when its memory is given back. Pure."""

from dataclasses import replace
from datetime import datetime

from barnraise.protocol.coordinator_messages import Directive
from barnraise.protocol.enums import PauseReason, RunStatus
from barnraise.training.limits.decision import TrainingDecision, format_until
from barnraise.training.local_control import LocalPause

# A pause that lasts longer frees the model. One that is known to, or that a person ordered without
# an end, does so after a moment, in which somebody may think better of it.
LONG_SECONDS = 60.0
MOMENT_SECONDS = 4.0
ORDERED = (PauseReason.HERE, PauseReason.SITE, PauseReason.PROGRAM)
# Kinds of decisions whose `until` is known when they begin: others end when their cause does.
TIMED = (PauseReason.HOURS, PauseReason.TRAFFIC)


def choose_pause(
    local: LocalPause | None, decision: TrainingDecision, directive: Directive, now: datetime
) -> TrainingDecision | None:
    """Return why a machine pauses; None if it trains."""
    if local is not None:
        pause = _describe_order(PauseReason.HERE, "on this machine", local.until, now)
        return replace(pause, is_offline=local.is_offline)
    if not decision.may_train:
        return decision if decision.kind in TIMED else replace(decision, until=None)
    return _pause_by_directive(directive, now)


def _pause_by_directive(directive: Directive, now: datetime) -> TrainingDecision | None:
    if directive.status is RunStatus.RECRUITING:
        return TrainingDecision(PauseReason.RECRUITING, "waits for more machines to join")
    if directive.status is not RunStatus.PAUSED:
        return None
    if not directive.own_pause:
        return TrainingDecision(PauseReason.RUN, "the run is paused on the site")
    until = directive.pause_until
    if until is not None and until <= now.timestamp():  # the next directive says so, too
        return None
    return _describe_order(PauseReason.SITE, "on the site", until, now)


def _describe_order(
    kind: PauseReason, place: str, until: float | None, now: datetime
) -> TrainingDecision:
    """Return the pause that somebody ordered at a place, until a time or without an end."""
    end = "" if until is None else f" until {format_until(until, now)}"
    return TrainingDecision(kind, f"paused{end} {place}", until)


def frees_memory(pause: TrainingDecision, paused_seconds: float, now: float) -> bool:
    """Return whether a pause that has lasted for some time gives the model's memory back now."""
    if pause.until is not None:
        is_long = pause.until - now + paused_seconds > LONG_SECONDS
    else:
        is_long = pause.kind in ORDERED
    return paused_seconds > (MOMENT_SECONDS if is_long else LONG_SECONDS)
