"""Describe a machine's limits and rules for people. Pure."""

from collections.abc import Callable
from typing import Any

from barnraise.formats import format_byte_rate, format_bytes


def _describe_switch(is_on: bool) -> str:
    return "yes" if is_on else "no"


# A limit → its label, and how its value is written.
TEXTS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "memory": ("memory", format_bytes),
    "device_memory": ("GPU memory", format_bytes),
    "disk": ("disk", format_bytes),
    "disk_writes_per_day": ("disk writes per day", format_bytes),
    "uplink": ("uplink", format_byte_rate),
    "announce": ("announced addresses", ", ".join),
    "port_mapping": ("port mapping", _describe_switch),
    "relay": ("relaying", _describe_switch),
    "clipping": ("clipping", str),
    "engine": ("engine of several GPUs", str),
    "tensor": ("GPUs that split each layer", str),
    "crash_safety": ("crash safety", str),
    "moments_bits": ("optimizer moments", "{} bits".format),
    "precision": ("precision", str),
    "deterministic": ("deterministic on a GPU", _describe_switch),
    "hours": ("hours", str),
    "idle": ("idle", "trains after {} min without keyboard and mouse".format),
    "on_battery": ("on battery", lambda trains: "trains" if trains else "does not train"),
    "busy_cpu": ("busy CPU", "pauses above {} % by other programs".format),
    "pause_for": ("pauses for", ", ".join),
    "threads": ("threads", str),
    "cpu": ("CPU time", "{} %".format),
    "max_temperature": ("temperature", "pauses from {} °C".format),
    "month_up": ("upload per month", format_bytes),
    "download": ("download", format_byte_rate),
}
# Those that say when a machine trains.
RULES = (
    *("hours", "idle", "on_battery", "busy_cpu"),
    *("pause_for", "cpu", "max_temperature", "month_up"),
)
# What holds without a limit, where "no limit" does not say it.
UNLIMITED_TEXTS = {
    "announce": "none",
    "tensor": "auto",
    "hours": "all",
    "idle": "trains also while somebody uses the machine",
    "busy_cpu": "trains also while other programs use it",
    "pause_for": "no program",
    "threads": "one per core",
    "cpu": "all of it",
}


def is_limited(value: Any) -> bool:
    """Return whether a value limits anything, in a machine's file or as it is reported."""
    return value is not None and value not in ("", (), [])


def describe_limit(name: str, value: Any) -> tuple[str, str]:
    """Return the label of a limit, and what its value means."""
    label, write = TEXTS[name]
    return label, write(value) if is_limited(value) else UNLIMITED_TEXTS.get(name, "no limit")
