"""Define the options that limit how much of a machine a worker may use."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from barnraise.formats import parse_bytes
from barnraise.peering.links.announced_names import check_announced
from barnraise.planning.limits import UNLIMITED, Limits

SIZE_OPTIONS = ("memory", "device_memory", "disk", "disk_writes_per_day", "uplink")


def _limit_option(help_text: str, *names: str) -> Any:
    """Return an option that `--help` lists under "Limits"."""
    return typer.Option(*names, help=help_text, rich_help_panel="Limits")


@dataclass(frozen=True)
class ResourceOptions:
    """The limits that decide how a model is trained. An option left out keeps its limit."""

    memory: Annotated[str, _limit_option("RAM the model may use, like 4GB; 'auto': no limit.")] = ""
    device_memory: Annotated[
        str, _limit_option("GPU memory it may use; without a GPU: RAM to compute in.")
    ] = ""
    disk: Annotated[str, _limit_option("Disk space that text and state may take.")] = ""
    disk_writes_per_day: Annotated[
        str,
        _limit_option(
            "Bytes a day its training may write to disk; 'auto': 0.3 times the drive's size; "
            "'unlimited'."
        ),
    ] = ""
    clipping: Annotated[str, _limit_option("Gradient clipping: auto, exact, layer or none.")] = ""
    crash_safety: Annotated[
        str, _limit_option("Crash safety of state on disk: auto, exact or restart.")
    ] = ""
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

    def apply_to(self, limits: Limits) -> Limits:
        """Return the limits with those replaced that an option gives; 'auto' lifts a size.

        Raises:
            StateError: an option's value is invalid.
        """
        changes: dict[str, Any] = {}
        for name, value in dataclasses.asdict(self).items():
            if value is None or value in ("", []):
                continue
            if name in SIZE_OPTIONS:
                changes[name] = _parse_limit(name, value)
            elif name == "moments_8bit":
                changes["moments_bits"] = 8 if value else 32
            elif name == "announce":
                changes[name] = check_announced([each for each in value if each != "auto"])
            else:
                changes[name] = value
        return dataclasses.replace(limits, **changes)


def _parse_limit(name: str, text: str) -> int | None:
    """Read the size of a limit; 'auto' is None, and writes to disk may be 'unlimited'."""
    if text == "auto":
        return None
    if name == "disk_writes_per_day" and text == "unlimited":
        return UNLIMITED
    return parse_bytes(text)


@dataclass(frozen=True)
class LimitOptions(ResourceOptions):
    """All limits: also those of the network, which do not change how a model is trained."""

    uplink: Annotated[str, _limit_option("Bytes a second its updates may use of the uplink.")] = ""
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
