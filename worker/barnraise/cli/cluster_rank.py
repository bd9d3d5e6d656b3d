"""Join as one of the ranks that `torchrun` has started: rank 0 is the worker, others obey it."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence

from barnraise.cli.machine_options import MachineOptions, measure_machine
from barnraise.errors import StateError
from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import Limits
from barnraise.state_dir import StateDir
from barnraise.swap.sharded.torchrun import ONE_RANK, count_ranks

# Imports of torch, which takes seconds, are in the functions that need it.


def obey_rank_0(runs: Sequence[str], limits: Limits) -> None:
    """Serve rank 0 and end the process, if this is another rank; return if it is rank 0.

    Raises:
        StateError: the engine cannot have ranks, or the other ranks cannot be reached.
    """
    count = count_ranks()
    if count > 1 and limits.engine != "sharded":
        raise StateError(
            f"torchrun has started {count} processes, which would all join as this machine: add "
            "--engine sharded, so that they train as one, or start without torchrun"
        )
    if count == 1 or os.environ["RANK"] == "0":
        return
    from barnraise.swap.sharded.rank import end_process, serve_commands
    from barnraise.swap.sharded.rank_place import RankPlace

    serve_commands(RankPlace.read(), _describe_command(runs, limits))
    end_process()


@contextlib.contextmanager
def lead_ranks(runs: Sequence[str], limits: Limits) -> Iterator[None]:
    """Lead the other ranks of a cluster, if there are any, while the block runs.

    Raises:
        StateError: a rank cannot be reached or is different.
    """
    if count_ranks() == 1:
        yield
        return
    from barnraise.swap.sharded.cluster import lead_cluster

    with lead_cluster(_describe_command(runs, limits)):
        yield


def _describe_command(runs: Sequence[str], limits: Limits) -> str:
    """Return what all ranks must have been started with."""
    return f"{' '.join(runs)}, tensor {limits.tensor or 'auto'}"


def measure_ranks(state_dir: StateDir, machine: MachineOptions, limits: Limits) -> Hardware:
    """Measure this machine; the other ranks of a cluster are assumed to be like rank 0.

    Raises:
        StateError: there is no such device, or the saved limits cannot be read.
    """
    count = count_ranks()
    if count > 1:
        from barnraise.swap.sharded.rank_place import RankPlace

        machine = dataclasses.replace(machine, device=str(RankPlace.read().device))
        hardware = measure_machine(state_dir, machine, limits)
        return dataclasses.replace(hardware, others=(hardware,) * (count - 1))
    hardware = measure_machine(state_dir, machine, limits)
    return dataclasses.replace(hardware, others=()) if ONE_RANK in os.environ else hardware


def without_lost_ranks(limits: Limits) -> Limits:
    """Return the limits; without ranks if these were lost too often."""
    return dataclasses.replace(limits, engine="swap") if ONE_RANK in os.environ else limits
