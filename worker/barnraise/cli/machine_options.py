"""Define the options that say where a machine's state is, and what it computes with."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from filelock import FileLock
from rich.markup import escape

from barnraise.cli.console import errors
from barnraise.cli.option_groups import option
from barnraise.planning.hardware import Hardware, printable_name, usable_cpus
from barnraise.planning.limits import Limits
from barnraise.protocol.reports import HardwareView
from barnraise.state_dir import StateDir

HomeOption = Annotated[
    Path | None,
    typer.Option(
        "--home", envvar="BARNRAISE_HOME", help="Where this machine's key and state are stored."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
HardwareOption = Annotated[
    Path | None,
    typer.Option(
        "--hardware",
        envvar="BARNRAISE_HARDWARE",
        help="File for this machine's measurements, which several workers can share.",
    ),
]


@dataclass(frozen=True)
class MachineOptions:
    """The options of commands that train or plan."""

    home: HomeOption = None
    device: str = option(
        "",
        "cpu, cuda:1, or several like cuda:0,cuda:2 (default: all GPUs that help); for `plan` also "
        "sizes of GPUs that are not here, like 2x24GB,12GB.",
        "--device",
        "--devices",
    )
    hardware: HardwareOption = None


def open_state_dir(home: Path | None) -> StateDir:
    """Open the state directory that an option names, or the default one."""
    return StateDir(StateDir.choose_path(home))


def measure_machine(
    state_dir: StateDir, machine: MachineOptions, limits: Limits | None = None
) -> Hardware:
    """Measure what this machine can do, or load the cached measurement.

    Measuring takes some ten seconds. One process measures at a time; the others wait.

    Torch uses the machine's CPU threads from now on, and never more than the limits allow (by
    default those saved), the CPUs that this process may use, or its quota of CPU time. The cache is
    in the state directory unless an option names another one.

    Raises:
        StateError: there is no such device, or the saved limits cannot be read.
    """
    import torch

    from barnraise.swap.device import choose_device
    from barnraise.swap.hardware_probe import probe

    threads = (limits or state_dir.limits).threads or torch.get_num_threads()
    torch.set_num_threads(min(threads, usable_cpus()))
    choice = choose_device(machine.device)
    if choice.note:
        errors.print_sentence(f"[yellow]{escape(choice.note)}.[/]")
    cache = (machine.hardware or state_dir.path / "hardware.json").absolute()
    cache.parent.mkdir(parents=True, exist_ok=True)
    if not cache.exists():
        errors.print("Measuring this machine, once …")
    with FileLock(cache.with_suffix(".lock")):
        first = probe(cache.parent, choice.name, cache)
        others = [
            probe(cache.parent, name, cache.with_stem(f"{cache.stem}-{name.replace(':', '-')}"))
            for name in choice.others
        ]
    return dataclasses.replace(first, others=tuple(others))


def hardware_view(hardware: Hardware) -> HardwareView:
    """Return the measurements as a coordinator receives them, with a name that can be shown."""
    name = printable_name(hardware.name)
    return HardwareView.model_validate(dataclasses.asdict(hardware) | {"name": name})
