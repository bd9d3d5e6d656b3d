"""Run `barnraise join`: train in a run."""

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.live import Live
from rich.markup import escape

from barnraise.cli.addresses import RunArgument
from barnraise.cli.console import configure_logging, out, stop_on_signals
from barnraise.cli.machine_options import (
    MachineOptions,
    hardware_view,
    measure_machine,
    open_state_dir,
)
from barnraise.cli.option_groups import expand_option_groups
from barnraise.cli.resource_options import LimitOptions
from barnraise.cli.status import format_status
from barnraise.errors import CoordinatorError
from barnraise.planning.limits import Limits

log = logging.getLogger("barnraise")

NICENESS = 10  # the priority of a polite worker, where priorities are such numbers
# Linux gives each session an equal share of the CPU; priorities count only within a session.
AUTOGROUP = Path("/proc/self/autogroup")
LOG_SECONDS = 10.0  # between two lines of the status in a log


@expand_option_groups
def join(
    run: RunArgument,
    machine: MachineOptions,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="UDP port for peers; 0: any free one.")
    ] = 0,
    *,
    resources: LimitOptions,
    polite: Annotated[
        bool, typer.Option("--polite/--eager", help="Let the machine's other programs go first.")
    ] = True,
    trust_one: Annotated[
        bool,
        typer.Option(
            "--trust-one",
            help="On the first join, believe the weights of a single volunteer that nobody else "
            "confirms.",
        ),
    ] = False,
) -> None:
    """Train in a run until it ends or you press Ctrl-C.

    Ctrl-C saves the work; the next join continues it.

    Limits given here are saved, as by `barnraise limits`.
    """
    # Importing torch takes seconds, so that only the commands that need it do so.
    from barnraise.exchange.network.iroh_transport import IrohTransport
    from barnraise.training.join import join_run
    from barnraise.training.memory_retry import run_within_memory
    from barnraise.training.train import Worker
    from barnraise.training.warm_start import fetch_initial_weights

    if polite:
        lower_priority()
    configure_logging()
    leaving = stop_on_signals()
    state_dir = open_state_dir(machine.home)
    limits = resources.apply_to(state_dir.limits)
    state_dir.limits = limits
    site_name = escape(state_dir.membership.mirror.name)
    out.print(f"Joining [bold]{escape(run)}[/] on {site_name} …")
    hardware = measure_machine(state_dir, machine.hardware, machine.device, machine.threads)
    fetch_weights = partial(fetch_initial_weights, state_dir, leaving, lambda: hardware)

    def join_within(limits: Limits) -> Worker | None:
        joined = join_run(state_dir, run, leaving, hardware_view(hardware), fetch_weights)
        if joined is None:
            return None
        joined = replace(joined, trust_one=trust_one)
        transport = IrohTransport(state_dir.identity.secret, port=port)
        return Worker(joined, leaving, hardware, limits, print_status, transport)

    with Live(console=out, auto_refresh=False, transient=False) as live:
        print_status = _status_printer(live)
        worker = run_within_memory(join_within, limits)
    if worker is None:
        return
    if worker.reporter.refused:
        raise CoordinatorError(worker.reporter.refused)
    outcome = "Left" if leaving.is_set() else "Finished"
    out.print(f"{outcome}. Everything is saved in {worker.joined.folder.path}", soft_wrap=True)


def _status_printer(live: Live) -> Callable[[dict[str, Any]], None]:
    """Return a function that shows a worker's status: on a terminal live, elsewhere in the log."""
    last_logged = 0.0

    def print_status(status: dict[str, Any]) -> None:
        nonlocal last_logged
        if out.is_terminal:
            live.update(format_status(status), refresh=True)
        elif time.monotonic() - last_logged > LOG_SECONDS:
            last_logged = time.monotonic()
            log.info("%s", format_status(status).plain)

    return print_status


def lower_priority() -> None:
    """Let all other programs of this machine go first; while they are idle, training is as fast.

    Call it before any thread is started, because threads inherit the priority.
    """
    process = psutil.Process()
    if psutil.WINDOWS:
        process.nice(psutil.BELOW_NORMAL_PRIORITY_CLASS)
    else:
        process.nice(max(NICENESS, process.nice()))
    # The file is missing on other systems, and where Linux shares time by processes alone.
    with contextlib.suppress(OSError):
        AUTOGROUP.write_text(str(NICENESS))
