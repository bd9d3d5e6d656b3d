"""Join as one of the ranks that `torchrun` has started: rank 0 is the worker, others obey it."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence

from barnraise.cli.machine_options import MachineOptions, measure_machine
from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import Limits
from barnraise.state_dir import StateDir
from barnraise.swap.sharded.torchrun import count_ranks, is_first_rank, refuse_other_engine

# Imports of torch, which takes seconds, are in the functions that need it.


def obey_rank_0(runs: Sequence[str], limits: Limits) -> None:
    """Serve rank 0 and end the process, if this is another rank; return if it is rank 0.

    Raises:
        StateError: the engine cannot have ranks, or the other ranks cannot be reached.
    """
    refuse_other_engine(limits.engine)
    if count_ranks() == 1 or is_first_rank():
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
    from barnraise.training.card_restart import ONE_RANK

    hardware = measure_machine(state_dir, machine, limits)
    return dataclasses.replace(hardware, others=()) if ONE_RANK in os.environ else hardware


def without_lost_ranks(limits: Limits) -> Limits:
    """Return the limits; without ranks if these were lost too often."""
    from barnraise.training.card_restart import ONE_RANK

    return dataclasses.replace(limits, engine="swap") if ONE_RANK in os.environ else limits


def run_ranks(train: Callable[[], None], should_leave: Callable[[float], bool]) -> None:
    """Train; begin again when a card or a rank is lost. A cluster is `torchrun`'s to start again.

    Raises:
        DeviceLostError: that happened too often, or in a cluster.
    """
    from barnraise.training.card_restart import run_with_restarts

    if count_ranks() > 1:
        train()
    else:
        run_with_restarts(train, should_leave, time.time)
