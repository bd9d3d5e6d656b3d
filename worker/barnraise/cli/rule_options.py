"""Define the options that say when a machine trains, and how much of its time it gives."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from barnraise.errors import StateError
from barnraise.formats import parse_bytes
from barnraise.planning.limits import RANGES, Limits
from barnraise.training.limits.machine_facts import FactsReader

SIZES = ("month_up", "download")


def rule_option(help_text: str) -> Any:
    """Return an option that `--help` lists under "When to train"."""
    return typer.Option(help=help_text, rich_help_panel="When to train")


@dataclass(frozen=True)
class RuleOptions:
    """The rules that say when a machine trains. One left out stays; 'auto' lifts it."""

    hours: Annotated[
        str | None,
        rule_option("Hours of the week, like \"mon-fri 19:00-07:00, sat-sun\"; 'auto': all."),
    ] = None
    idle: Annotated[
        str | None, rule_option("Minutes without keyboard and mouse before it trains.")
    ] = None
    on_battery: Annotated[
        str | None, rule_option("Whether it trains on battery: yes or no (default).")
    ] = None
    busy_cpu: Annotated[
        str | None, rule_option("Percent of the CPU; it pauses while other programs use more.")
    ] = None
    pause_for: Annotated[
        str | None, rule_option("Programs, like blender,steam; it pauses while one of them runs.")
    ] = None
    cpu: Annotated[str | None, rule_option("Percent of the time in which it computes.")] = None
    max_temperature: Annotated[
        str | None, rule_option("Degrees Celsius of CPU or GPU from which it pauses.")
    ] = None
    month_up: Annotated[
        str | None, rule_option("Bytes that it may send to peers in a month, like 20GB.")
    ] = None
    download: Annotated[
        str | None, rule_option("Bytes a second that it may receive from peers.")
    ] = None

    def apply_to(self, limits: Limits) -> Limits:
        """Return the limits with those rules replaced that an option gives.

        Raises:
            StateError: a rule is invalid, or this machine cannot obey it.
        """
        texts = {name: getattr(self, name, None) for name in RULE_NAMES}
        given = {name: text for name, text in texts.items() if text is not None}
        changes = {name: _parse_rule(name, text.strip()) for name, text in given.items()}
        new_limits = dataclasses.replace(limits, **changes)
        readable = {name: changes[name] for name in ("idle", "max_temperature") if name in changes}
        checked = dataclasses.replace(Limits(), **readable)
        if reason := FactsReader(gpu_indices=(0,)).explain_missing(checked):
            raise StateError(reason)
        return new_limits


# `threads` is among the options of the machine where a command trains.
RULE_NAMES = (*(field.name for field in dataclasses.fields(RuleOptions)), "threads")


def _parse_rule(name: str, text: str) -> Any:
    """Read one rule; 'auto' is the value of none.

    Raises:
        StateError: the text is no such rule; the message has an example.
    """
    if text == "auto":
        return next(f.default for f in dataclasses.fields(Limits) if f.name == name)
    if name == "hours":
        if not text:
            raise StateError('hours: "" is no time of a week; write it like "sat-sun"')
        return text
    if name == "on_battery":
        if text.lower() not in ("yes", "no"):
            raise StateError(f"on battery is yes or no, like --on-battery no; '{text}' is neither")
        return text.lower() == "yes"
    if name == "pause_for":
        return tuple(program.strip() for program in text.split(","))
    if name in SIZES:
        return parse_bytes(text)
    try:
        return int(text.removesuffix("%"))
    except ValueError:
        example = RANGES[name][2]
        raise StateError(
            f"{name.replace('_', ' ')} is {example}; '{text}' is no whole number"
        ) from None
