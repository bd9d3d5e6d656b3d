"""Run `barnraise limits`: set or show how much of this machine a worker may use."""

import dataclasses
import shutil

from barnraise.cli.console import new_table, out, print_json
from barnraise.cli.machine_options import HomeOption, JsonOption, open_state_dir
from barnraise.cli.option_groups import expand_option_groups
from barnraise.cli.resource_options import LimitOptions
from barnraise.errors import PlanError
from barnraise.formats import format_byte_rate, format_bytes
from barnraise.planning.budgets import DRIVE_WRITES_PER_DAY, daily_write_limit
from barnraise.planning.limits import Limits


@expand_option_groups
def limits(resources: LimitOptions, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Set or show how much of this machine a worker may use, from the next join on."""
    state_dir = open_state_dir(home)
    saved_limits = state_dir.limits
    new_limits = resources.apply_to(saved_limits)
    if new_limits != saved_limits:
        state_dir.limits = new_limits
    if as_json:
        print_json(dataclasses.asdict(new_limits))
        return
    table = new_table(show_header=False)
    drive = shutil.disk_usage(state_dir.path).total
    for label, text in _describe_limits(new_limits, drive):
        table.add_row(label, text)
    out.print(table)


def summarise_limits(limits: Limits) -> str:
    """Return the limits that are set, in a few words."""
    sizes = [
        (limits.memory, "RAM"),
        (limits.device_memory, "GPU memory"),
        (limits.disk, "disk"),
    ]
    parts = [f"{format_bytes(size)} {label}" for size, label in sizes if size is not None]
    if limits.uplink is not None:
        parts.append(f"{format_byte_rate(limits.uplink)} up")
    return ", ".join(parts) or "none"


def explain_limits(error: PlanError, limits: Limits) -> PlanError:
    """Return a refusal to train that also names the limits which were in force."""
    in_force = summarise_limits(limits)
    if in_force == "none":
        return error
    return PlanError(
        f"{error} (your limits: {in_force}; `barnraise limits --memory auto --disk auto` "
        "lifts those that are saved)"
    )


def _describe_limits(limits: Limits, drive: int) -> list[tuple[str, str]]:
    """Return each limit's label and its value; `drive` has so many bytes."""

    def size(limit: int | None) -> str:
        return "no limit" if limit is None else format_bytes(limit)

    uplink = "no limit" if limits.uplink is None else format_byte_rate(limits.uplink)
    return [
        ("memory", size(limits.memory)),
        ("device memory", size(limits.device_memory)),
        ("disk", size(limits.disk)),
        ("disk writes per day", _describe_daily_writes(limits, drive)),
        ("uplink", uplink),
        ("announced addresses", ", ".join(limits.announce) or "none"),
        ("port mapping", "yes" if limits.port_mapping else "no"),
        ("relaying", "yes" if limits.relay else "no"),
        ("clipping", limits.clipping),
        ("crash safety", limits.crash_safety),
        ("optimizer moments", f"{limits.moments_bits} bits"),
        ("precision", limits.precision),
        ("deterministic on a GPU", "yes" if limits.deterministic else "no"),
        ("compiled", "yes" if limits.compiled else "no"),
    ]


def _describe_daily_writes(limits: Limits, drive: int) -> str:
    """Describe how much may be written to the drive in a day."""
    daily = daily_write_limit(drive, limits)
    if daily is None:
        return "no limit"
    if limits.disk_writes_per_day is not None:
        return format_bytes(daily)
    return f"{format_bytes(daily)}, {DRIVE_WRITES_PER_DAY} times the drive's size"
