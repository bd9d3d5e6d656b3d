"""Choose what a machine pauses for, and when its memory is given back. Pure."""

from dataclasses import dataclass
from datetime import datetime

from barnraise.protocol.coordinator_messages import Directive
from barnraise.protocol.enums import PauseReason, RunStatus
from barnraise.protocol.reports import PauseView
from barnraise.training.limits.decision import TrainingDecision, format_until
from barnraise.training.local_control import LocalPause

# A pause that lasts longer frees the model. One that is known to, or that a person ordered without
# an end, does so after a moment, in which somebody may think better of it.
LONG_SECONDS = 60.0
MOMENT_SECONDS = 4.0
ORDERED = (PauseReason.HERE, PauseReason.SITE, PauseReason.PROGRAM)


@dataclass(frozen=True)
class Pause:
    """Why a machine takes no steps now.

    Attributes:
        reason: for everybody who sees the run.
        sentence: for the machine's owner.
        until: seconds since 1970 at which it ends, where that is known.
        is_offline: whether the machine leaves its peers meanwhile.
    """

    reason: PauseReason
    sentence: str
    until: float | None = None
    is_offline: bool = False

    @property
    def view(self) -> PauseView:
        """Return it as reports state it."""
        return PauseView(reason=self.reason, until=self.until)


# Kinds of decisions whose `until` is known when they begin: others end when their cause does.
TIMED = (PauseReason.HOURS, PauseReason.TRAFFIC)


def choose_pause(
    local: LocalPause | None, decision: TrainingDecision, directive: Directive, now: datetime
) -> Pause | None:
    """Return why a machine pauses; None if it trains."""
    if local is not None:
        sentence = "paused on this machine"
        if local.until is not None:
            sentence = f"paused until {format_until(local.until, now)} on this machine"
        return Pause(PauseReason.HERE, sentence, local.until, local.is_offline)
    if not decision.may_train and decision.kind is not None:
        until = decision.until if decision.kind in TIMED else None
        return Pause(decision.kind, decision.reason, until, decision.is_offline)
    return _pause_by_directive(directive, now)


def _pause_by_directive(directive: Directive, now: datetime) -> Pause | None:
    if directive.status is RunStatus.RECRUITING:
        return Pause(PauseReason.RECRUITING, "waits for more machines to join")
    if directive.status is not RunStatus.PAUSED:
        return None
    if not directive.own_pause:
        return Pause(PauseReason.RUN, "the run is paused on the site")
    until = directive.pause_until
    if until is None:
        return Pause(PauseReason.SITE, "paused on the site")
    if until <= now.timestamp():  # the next directive says so, too
        return None
    return Pause(PauseReason.SITE, f"paused until {format_until(until, now)} on the site", until)


def frees_memory(pause: Pause, paused_seconds: float, now: float) -> bool:
    """Return whether a pause that has lasted for some time gives the model's memory back now."""
    if pause.until is not None:
        is_long = pause.until - now + paused_seconds > LONG_SECONDS
    else:
        is_long = pause.reason in ORDERED
    return paused_seconds > (MOMENT_SECONDS if is_long else LONG_SECONDS)
