"""Define the options that limit how much of a machine a worker may use."""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

from barnraise.cli.option_groups import option
from barnraise.errors import StateError
from barnraise.formats import parse_bytes
from barnraise.peering.links.announced_names import check_announced
from barnraise.planning.limits import RANGES, SIZES, UNLIMITED, Limits
from barnraise.training.limits.machine_facts import FactsReader

Text = str | None  # of an option; None where it is left out


_limit = partial(option, None, rich_help_panel="Limits")
_rule = partial(option, None, rich_help_panel="When to train")


@dataclass(frozen=True)
class ResourceOptions:
    """The limits that decide how a model is trained. One left out stays; 'auto' lifts it."""

    memory: Text = _limit("RAM the model may use, like 4GB; 'auto': no limit.")
    device_memory: Text = _limit("GPU memory it may use; without a GPU: RAM to compute in.")
    disk: Text = _limit("Disk space that text and state may take.")
    disk_writes_per_day: Text = _limit(
        "Bytes a day its training may write to disk; 'auto': 0.3 times the drive's size; "
        "'unlimited'."
    )
    clipping: Text = _limit("Gradient clipping: auto, exact, layer or none.")
    crash_safety: Text = _limit("Crash safety of state on disk: auto, exact or restart.")
    moments_8bit: bool | None = _limit("Bits of Adam's moments.", "--moments-8bit/--moments-32bit")
    deterministic: bool | None = _limit(
        "Whether a GPU gives the same bits each time; it is slower.",
        "--deterministic/--nondeterministic",
    )
    engine: Text = _limit(
        "How several GPUs work: swap (one copy of the state in RAM), sharded (each has a part of "
        "it) or auto, which is swap until NCCL has been measured."
    )
    threads: Text = _limit("CPU threads to train with, at most; 'auto': one per core.")
    tensor: Text = _limit("How many GPUs split each layer, with --engine sharded; or auto.")

    def apply_to(self, limits: Limits) -> Limits:
        """Return the limits with those replaced that an option gives.

        Raises:
            StateError: an option's value is invalid.
        """
        given = dataclasses.asdict(self)
        bits = given.pop("moments_8bit")
        changes = {name: _parse(name, value) for name, value in given.items() if value is not None}
        if bits is not None:
            changes["moments_bits"] = 8 if bits else 32
        return dataclasses.replace(limits, **changes)


def _parse(name: str, value: Any) -> Any:
    """Read one limit; 'auto' is the value of none.

    Raises:
        StateError: the text is no such limit; the message has an example.
    """
    value = value.strip() if isinstance(value, str) else value
    if value == "auto":
        return next(f.default for f in dataclasses.fields(Limits) if f.name == name)
    if name == "disk_writes_per_day" and value == "unlimited":
        return UNLIMITED
    if name in SIZES:
        return parse_bytes(value)
    if name in RANGES:
        return _parse_number(name, value)
    if name == "announce":
        return check_announced([address for address in value if address != "auto"])
    if name == "pause_for":
        return tuple(program.strip() for program in value.split(","))
    if name == "hours" and not value:
        raise StateError('hours: "" is no time of a week; write it like "sat-sun"')
    if name == "on_battery":
        if value.lower() not in ("yes", "no"):
            raise StateError(f"on battery is yes or no, like --on-battery no; '{value}' is neither")
        return value.lower() == "yes"
    return value


def _parse_number(name: str, text: str) -> int:
    try:
        return int(text.removesuffix("%"))
    except ValueError:
        example = RANGES[name][2]
        raise StateError(
            f"{name.replace('_', ' ')} is {example}; '{text}' is no whole number"
        ) from None


@dataclass(frozen=True)
class LimitOptions(ResourceOptions):
    """All limits: also those of the network, and the rules that say when a machine trains."""

    uplink: Text = _limit("Bytes a second its updates may use of the uplink.")
    download: Text = _limit("Bytes a second that it may receive from peers.")
    announce: list[str] | None = _limit(
        "HOST:PORT at which peers reach this machine, where a router or container forwards the "
        "port; repeatable; 'auto': none."
    )
    port_mapping: bool | None = _limit(
        "Whether to ask the router to forward the port.", "--port-mapping/--no-port-mapping"
    )
    relay: bool | None = _limit(
        "Whether to pass on others' updates before they are requested; a fast line may carry for "
        "many slower ones.",
        "--relay/--no-relay",
    )
    hours: Text = _rule("Hours of the week, like \"mon-fri 19:00-07:00, sat-sun\"; 'auto': all.")
    idle: Text = _rule("Minutes without keyboard and mouse before it trains.")
    on_battery: Text = _rule("Whether it trains on battery: yes or no (default).")
    busy_cpu: Text = _rule("Percent of the CPU; it pauses while other programs use more.")
    pause_for: Text = _rule("Programs, like blender,steam; it pauses while one of them runs.")
    cpu: Text = _rule("Percent of the time in which it computes.")
    max_temperature: Text = _rule("Degrees Celsius of CPU or GPU from which it pauses.")
    month_up: Text = _rule("Bytes that it may send to peers in a month, like 20GB.")

    def apply_to(self, limits: Limits) -> Limits:
        """Return the limits with those replaced that an option gives.

        Raises:
            StateError: an option's value is invalid, or this machine cannot obey it.
        """
        new_limits = super().apply_to(limits)
        has_new_rule = self.idle is not None or self.max_temperature is not None
        if has_new_rule and (reason := FactsReader(gpu_indices=(0,)).explain_missing(new_limits)):
            raise StateError(reason)
        return new_limits
