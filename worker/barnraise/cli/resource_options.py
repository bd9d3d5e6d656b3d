"""Define the options that limit how much of a machine a worker may use."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from barnraise.errors import StateError
from barnraise.formats import parse_bytes
from barnraise.peering.links.announced_names import check_announced
from barnraise.planning.limits import RANGES, SIZES, UNLIMITED, Limits
from barnraise.training.limits.machine_facts import FactsReader

Text = str | None  # of an option; None where it is left out


def _limit_option(help_text: str, *names: str) -> Any:
    """Return an option that `--help` lists under "Limits"."""
    return typer.Option(*names, help=help_text, rich_help_panel="Limits")


def _rule_option(help_text: str) -> Any:
    """Return an option that `--help` lists under "When to train"."""
    return typer.Option(help=help_text, rich_help_panel="When to train")


@dataclass(frozen=True)
class ResourceOptions:
    """The limits that decide how a model is trained. One left out stays; 'auto' lifts it."""

    memory: Annotated[Text, _limit_option("RAM the model may use, like 4GB; 'auto': no limit.")] = (
        None
    )
    device_memory: Annotated[
        Text, _limit_option("GPU memory it may use; without a GPU: RAM to compute in.")
    ] = None
    disk: Annotated[Text, _limit_option("Disk space that text and state may take.")] = None
    disk_writes_per_day: Annotated[
        Text,
        _limit_option(
            "Bytes a day its training may write to disk; 'auto': 0.3 times the drive's size; "
            "'unlimited'."
        ),
    ] = None
    clipping: Annotated[Text, _limit_option("Gradient clipping: auto, exact, layer or none.")] = (
        None
    )
    crash_safety: Annotated[
        Text, _limit_option("Crash safety of state on disk: auto, exact or restart.")
    ] = None
    moments_8bit: Annotated[
        bool | None,
        _limit_option("Bits of Adam's moments.", "--moments-8bit/--moments-32bit"),
    ] = None

    deterministic: Annotated[
        bool | None,
        _limit_option(
            "Whether a GPU gives the same bits each time; it is slower.",
            "--deterministic/--nondeterministic",
        ),
    ] = None
    compiled: Annotated[
        bool | None,
        _limit_option(
            "Whether torch.compile joins a layer's kernels; it starts minutes later.",
            "--compile/--no-compile",
        ),
    ] = None

    engine: Annotated[
        Text,
        _limit_option(
            "How several GPUs work: swap (one copy of the state in RAM), sharded (each has a part "
            "of it) or auto, which is swap until NCCL has been measured."
        ),
    ] = None
    tensor: Annotated[
        Text, _limit_option("How many GPUs split each layer, with --engine sharded; or auto.")
    ] = None

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

    uplink: Annotated[Text, _limit_option("Bytes a second its updates may use of the uplink.")] = (
        None
    )
    announce: Annotated[
        list[str] | None,
        _limit_option(
            "HOST:PORT at which peers reach this machine, where a router or container forwards "
            "the port; repeatable; 'auto': none."
        ),
    ] = None
    port_mapping: Annotated[
        bool | None,
        _limit_option(
            "Whether to ask the router to forward the port.", "--port-mapping/--no-port-mapping"
        ),
    ] = None
    relay: Annotated[
        bool | None,
        _limit_option(
            "Whether to pass on others' updates before they are requested; a fast line may carry "
            "for many slower ones.",
            "--relay/--no-relay",
        ),
    ] = None

    hours: Annotated[
        Text,
        _rule_option("Hours of the week, like \"mon-fri 19:00-07:00, sat-sun\"; 'auto': all."),
    ] = None
    idle: Annotated[Text, _rule_option("Minutes without keyboard and mouse before it trains.")] = (
        None
    )
    on_battery: Annotated[
        Text, _rule_option("Whether it trains on battery: yes or no (default).")
    ] = None
    busy_cpu: Annotated[
        Text, _rule_option("Percent of the CPU; it pauses while other programs use more.")
    ] = None
    pause_for: Annotated[
        Text, _rule_option("Programs, like blender,steam; it pauses while one of them runs.")
    ] = None
    cpu: Annotated[Text, _rule_option("Percent of the time in which it computes.")] = None
    max_temperature: Annotated[
        Text, _rule_option("Degrees Celsius of CPU or GPU from which it pauses.")
    ] = None
    month_up: Annotated[
        Text, _rule_option("Bytes that it may send to peers in a month, like 20GB.")
    ] = None
    download: Annotated[Text, _rule_option("Bytes a second that it may receive from peers.")] = None

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


@dataclass(frozen=True)
class SavedLimitOptions(LimitOptions):
    """All limits of `barnraise limits`; other commands have `--threads` for themselves."""

    threads: Annotated[
        Text, _rule_option("CPU threads to train with, at most; 'auto': one per core.")
    ] = None
