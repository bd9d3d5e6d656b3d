"""Run `barnraise limits`: set or show how much of this machine a worker may use."""

import dataclasses

from barnraise.cli.console import new_table, out, print_json
from barnraise.cli.machine_options import HomeOption, JsonOption, open_state_dir
from barnraise.cli.option_groups import expand_option_groups
from barnraise.cli.resource_options import LimitOptions
from barnraise.formats import format_byte_rate, format_bytes
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
    for label, text in _describe_limits(new_limits):
        table.add_row(label, text)
    out.print(table)


def _describe_limits(limits: Limits) -> list[tuple[str, str]]:
    """Return each limit's label and its value, in the order of the options."""

    def size(limit: int | None) -> str:
        return "no limit" if limit is None else format_bytes(limit)

    uplink = "no limit" if limits.uplink is None else format_byte_rate(limits.uplink)
    return [
        ("memory", size(limits.memory)),
        ("device memory", size(limits.device_memory)),
        ("disk", size(limits.disk)),
        ("disk writes per day", size(limits.disk_writes_per_day)),
        ("uplink", uplink),
        ("clipping", limits.clipping),
        ("crash safety", limits.crash_safety),
        ("Adam's moments", f"{limits.moments_bits} bits"),
        ("precision", limits.precision),
    ]
