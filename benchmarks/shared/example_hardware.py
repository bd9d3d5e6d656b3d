"""A machine with given rates, so that plans do not depend on the machine that runs them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from barnraise.planning.hardware import Hardware

CPU_MACHINE = Hardware(
    device="cpu",
    name="a machine",
    cores=2,
    memory=8 << 30,
    device_memory=0,
    disk=100 << 30,
    dtype="float32",
    matmul=((768, 1e11),),
    attention=5e10,
    elementwise=1e10,
    to_device=1e10,
    from_device=1e10,
    stream=2e10,
    adam=5e8,
    disk_read=1e9,
    disk_write=1e9,
)


def cpu_machine(**fields: Any) -> Hardware:
    """Return a machine without a GPU that differs in these fields from `CPU_MACHINE`."""
    return replace(CPU_MACHINE, **fields)


# One of several machines that train on this one: their plans have one thread each.
ONE_CORE_MACHINE = cpu_machine(cores=1, disk=8 << 30)


def save_example_measurement(path: Path) -> None:
    """Save `CPU_MACHINE` as what processes with one thread have measured on this machine.

    Real measurements take ten seconds, and all of the processor.
    """
    import torch

    from barnraise.swap.hardware_probe import save_measurement

    assert torch.get_num_threads() == 1
    save_measurement(path, path.parent, "cpu", CPU_MACHINE)
