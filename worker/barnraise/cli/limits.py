"""Run `barnraise limits`: set or show how much of this machine a worker may use."""

import dataclasses
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import psutil
from rich.markup import escape

from barnraise.cli.console import errors, new_table, out, print_json
from barnraise.cli.machine_options import HomeOption, JsonOption, open_state_dir
from barnraise.cli.resource_options import LimitOptions
from barnraise.cli.run_folders import RunFolder
from barnraise.errors import PlanError
from barnraise.formats import format_bytes
from barnraise.planning.budgets import DRIVE_WRITES_PER_DAY, daily_write_limit
from barnraise.planning.hardware import Hardware
from barnraise.planning.limit_texts import RULES, TEXTS, describe_limit
from barnraise.planning.limits import UNLIMITED, Limits
from barnraise.planning.search import make_plan
from barnraise.protocol.reports import LimitsView
from barnraise.spec import RunSpec, preset
from barnraise.state_dir import StateDir

SMALLEST = "gpt-nano"  # of the presets
FITTED = ("memory", "device_memory", "disk", "uplink")  # limits to name where a model does not fit
# The rates of a PC's CPU, for questions that no rate decides.
TYPICAL_CPU = Hardware(
    device="cpu",
    name="this machine",
    cores=4,
    memory=0,
    device_memory=0,
    disk=0,
    dtype="float32",
    matmul=((1024, 1.5e11),),
    attention=5e10,
    elementwise=1.2e10,
    to_device=1.2e10,
    from_device=1.2e10,
    stream=2e10,
    adam=6e8,
    disk_read=1.5e9,
    disk_write=8e8,
)


def limits(resources: LimitOptions, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Set or show how much of this machine a worker may use, and when.

    The rules that say when to train apply at once, also to a worker that runs; how much it may use
    applies from the next join on.

    Example: barnraise limits --hours "mon-fri 19:00-07:00, sat-sun" --idle 10
    """
    state_dir = open_state_dir(home)
    saved_limits = state_dir.limits
    new_limits = resources.apply_to(saved_limits)
    if new_limits != saved_limits:
        state_dir.limits = new_limits
    if as_json:
        print_json(dataclasses.asdict(new_limits))
        return
    warn_of_misfits(state_dir, new_limits)
    texts = {name: describe_limit(name, getattr(new_limits, name)) for name in TEXTS}
    label, _ = texts["disk_writes_per_day"]
    drive = shutil.disk_usage(state_dir.path).total
    texts["disk_writes_per_day"] = (label, _describe_daily_writes(new_limits, drive))
    table = new_table(show_header=False)
    for title, are_rules in (("When it trains", True), ("What it may use", False)):
        table.add_row(f"[bold]{title}[/]")
        for name, (label, value) in texts.items():
            if (name in RULES) == are_rules:
                table.add_row(f"  {label}", escape(value))
    out.print(table)


def summarise_limits(limits: Limits, names: Iterable[str] = LimitsView.model_fields) -> str:
    """Return those of the named limits that are set, in a few words."""
    unset = Limits()
    changed = {name: getattr(limits, name) for name in names}
    parts = [
        " ".join(describe_limit(name, value))
        for name, value in changed.items()
        if value != getattr(unset, name)
    ]
    return ", ".join(parts)


def explain_limits(error: PlanError, limits: Limits) -> PlanError:
    """Return a refusal to train that also names the limits which were in force."""
    in_force = summarise_limits(limits, FITTED)
    if not in_force:
        return error
    return PlanError(
        f"{error} (your limits: {in_force}; `barnraise limits --memory auto --disk auto` "
        "lifts those that are saved)"
    )


def warn_of_misfits(state_dir: StateDir, limits: Limits) -> None:
    """Print which runs of this machine no longer fit; without any run, whether any model does."""
    if not limits.has_sizes:
        return
    views = [RunFolder(path, "").view for path in state_dir.run_folders()]
    specs = {view.name: RunSpec.from_json(view.spec) for view in views if view is not None}
    for name, spec in (specs or {SMALLEST: RunSpec(model=preset(SMALLEST))}).items():
        try:
            check_fit(spec, limits, state_dir.path)
        except PlanError as error:
            errors.print_sentence(f"[yellow]{escape(name)}: {escape(str(error))}[/]")


def check_fit(spec: RunSpec, limits: Limits, folder: Path) -> None:
    """Refuse limits within which a run's model cannot train on this machine's CPU.

    Nothing is measured: sizes alone decide what fits.

    Args:
        spec: the run's rules.
        limits: the owner's.
        folder: where the state will lie.

    Raises:
        PlanError: with what would fit.
    """
    sizes = replace(
        TYPICAL_CPU,
        memory=psutil.virtual_memory().total,
        disk=shutil.disk_usage(folder).free,
    )
    of_sizes = replace(limits, disk_writes_per_day=UNLIMITED)
    try:
        make_plan(sizes, spec.model, of_sizes, spec.recipe.step_sequences)
    except PlanError as error:
        raise explain_limits(error, limits) from None


def _describe_daily_writes(limits: Limits, drive: int) -> str:
    """Describe how much may be written to the drive in a day."""
    daily = daily_write_limit(drive, limits)
    if daily is None:
        return "no limit"
    if limits.disk_writes_per_day is not None:
        return format_bytes(daily)
    return f"{format_bytes(daily)}, {DRIVE_WRITES_PER_DAY} times the drive's size"
