"""Describe the rules that say when and how much a machine trains, for people. Pure."""

from barnraise.formats import format_byte_rate, format_bytes
from barnraise.planning.limits import Limits
from barnraise.protocol.reports import LimitsView

NO_RULE = {
    "Hours": "all",
    "Idle": "trains also while somebody uses the machine",
    "On battery": "trains",
    "Busy CPU": "trains also while other programs use it",
    "Pauses for": "no program",
    "Threads": "one per core",
    "CPU time": "all of it",
    "Temperature": "no limit",
    "Upload per month": "no limit",
    "Download": "no limit",
}


TEXTS = {
    "hours": ("Hours", "{}"),
    "idle": ("Idle", "trains after {} min without keyboard and mouse"),
    "busy_cpu": ("Busy CPU", "pauses above {} % by other programs"),
    "threads": ("Threads", "{}"),
    "cpu": ("CPU time", "{} %"),
    "max_temperature": ("Temperature", "pauses from {} °C"),
}


def describe_rules(rules: Limits | LimitsView) -> list[tuple[str, str]]:
    """Return the rules that are set, as a machine has or reports them: label and value."""
    rows: dict[str, str] = {}
    for name, (label, text) in TEXTS.items():
        if value := getattr(rules, name):
            rows[label] = text.format(value)
    if rules.on_battery is False:
        rows["On battery"] = "does not train"
    if rules.pause_for:
        rows["Pauses for"] = ", ".join(rules.pause_for)
    if rules.month_up is not None:
        rows["Upload per month"] = format_bytes(rules.month_up)
    if rules.download is not None:
        rows["Download"] = format_byte_rate(rules.download)
    return [(label, rows[label]) for label in NO_RULE if label in rows]
