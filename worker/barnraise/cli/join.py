"""Run `barnraise join`: train in a run."""

import _thread
import contextlib
import logging
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.live import Live
from rich.markup import escape

from barnraise.cli.addresses import RunArgument
from barnraise.cli.console import (
    STATUS_LOGGER,
    configure_logging,
    errors,
    out,
)
from barnraise.cli.doctor.command import run_first_checkup
from barnraise.cli.keys import read_keys
from barnraise.cli.last_words import compose_last_words
from barnraise.cli.limits import explain_limits, summarise_limits
from barnraise.cli.log_file import LOG_FOLDER, WorkerLogHandler
from barnraise.cli.machine_options import (
    MachineOptions,
    hardware_view,
    measure_machine,
    open_state_dir,
)
from barnraise.cli.option_groups import expand_option_groups
from barnraise.cli.panel import build_panel, format_status_line
from barnraise.cli.resource_options import LimitOptions
from barnraise.cli.signals import silence_terminals, stop_on_signals
from barnraise.cli.site_access import check_trainable, find_run, open_site
from barnraise.errors import CoordinatorError, PlanError
from barnraise.formats import format_bytes
from barnraise.planning.limits import Limits
from barnraise.protocol.coordinator_messages import TextManifest
from barnraise.protocol.signing import open_signed
from barnraise.training.limits.machine_facts import FactsReader
from barnraise.training.limits.rule_watch import RuleWatch
from barnraise.training.local_control import LocalControl, LocalPause
from barnraise.training.local_status import LocalStatus

log = logging.getLogger("barnraise")
status_log = logging.getLogger(STATUS_LOGGER)

NICENESS = 10  # the priority of a polite worker, where priorities are such numbers
# Linux gives each session an equal share of the CPU; priorities count only within a session.
AUTOGROUP = Path("/proc/self/autogroup")
KEY_PAUSE_SECONDS = 3600.0  # that the panel's key P pauses for
LOG_SECONDS = 10.0  # between two lines of the status in a log that people read
FILE_SECONDS = 60.0  # between two lines of the status in the log file of a terminal's worker


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
            help="On the first join, believe the weights of the connected volunteers, even of a "
            "single one, though the site does not confirm them.",
        ),
    ] = False,
) -> None:
    """Train in a run until it ends or you press Ctrl-C.

    Ctrl-C saves the work; the next join continues it. With the run's address, a machine that is
    not enrolled yet enrols first. Limits given here are saved, as by `barnraise limits`.

    Example: barnraise join https://train.example.org/runs/first-barn
    """
    if polite:
        lower_priority()
    state_dir = open_state_dir(machine.home)
    new_limits = machine.apply_to(resources.apply_to(state_dir.limits))
    # What can be refused is refused before anything that takes time.
    membership = open_site(state_dir, run)
    view = find_run(state_dir, run.name)
    if view is not None:
        check_trainable(view)

    # Importing torch takes seconds, so that only the commands that need it do so.
    from barnraise.peering.transports.iroh_transport import IrohTransport
    from barnraise.training.join import join_run
    from barnraise.training.memory_retry import run_within_memory
    from barnraise.training.memory_watch import MemoryWatch
    from barnraise.training.mixing_worker import MixingWorker
    from barnraise.training.offline_pause import OfflinePauses, follow_event
    from barnraise.training.running_mark import create_within_memory
    from barnraise.training.train import Worker
    from barnraise.training.warm_start import fetch_initial_weights

    configure_logging(WorkerLogHandler(state_dir.path / LOG_FOLDER))
    leaving = stop_on_signals()
    shown_name = view.name if view is not None else run.name
    site_name = escape(membership.mirror.name)
    text = ""
    if view is not None and view.manifest is not None:
        manifest = open_signed(view.manifest, "manifest", TextManifest)
        text = f"; its text takes {format_bytes(manifest.text_bytes)} of disk"
    out.print(f"Joining [bold]{escape(shown_name)}[/] on {site_name}{text} …", soft_wrap=True)
    run_first_checkup(state_dir)
    hardware = measure_machine(state_dir, machine)
    fetch_weights = partial(fetch_initial_weights, state_dir, leaving, lambda: hardware)
    display = StatusDisplay(summarise_limits(new_limits))

    def join_within(limits: Limits) -> Worker | None:
        joined = join_run(state_dir, run.name, leaving, hardware_view(hardware), fetch_weights)
        if joined is None:
            return None
        joined = replace(joined, trust_one=trust_one)
        display.control = LocalControl(joined.folder.path)
        transport = IrohTransport(joined.coordinator.identity.secret, port=port)

        def create(limits: Limits) -> Worker:
            worker_class = MixingWorker if joined.spec.recipe.mixes_weights else Worker
            # It may leave by itself for a while, without the command.
            ending = follow_event(leaving)
            return worker_class(joined, ending, hardware, limits, display.show, transport)

        try:
            worker = create_within_memory(joined.folder.path, limits, create)
        except PlanError as error:
            joined.folder.close()
            raise explain_limits(error, limits) from None
        worker.watch_memory(MemoryWatch())
        worker.watch_rules(rules)
        if limits == new_limits:  # and not the smaller ones after a shortage of memory
            state_dir.limits = new_limits
        return worker

    gpu_index = hardware.device_index if hardware.device == "cuda" else None
    rules = RuleWatch(state_dir, FactsReader(gpu_index=gpu_index))
    with display.open(), rules.running():
        pauses = OfflinePauses(state_dir, rules, leaving, display.show)
        worker = pauses.run_between(partial(run_within_memory, join_within, new_limits))
    if worker is None:
        return
    if worker.reporter.refused:
        raise CoordinatorError(worker.reporter.refused)
    last_words = compose_last_words(
        view.slug or view.id if view is not None else run.name,
        worker.joined.folder.path,
        display.last_status,
        leaving.is_set(),
        membership,
    )
    out.print(*last_words, sep="\n", soft_wrap=True)


class StatusDisplay:
    """A worker's status: a panel at the end of a terminal, below the log, or lines in a log.

    Attributes:
        control: pauses and resumes the worker; None until the run is joined.
        last_status: None before the first one.
    """

    def __init__(self, limits: str) -> None:
        """Show nothing yet. `limits` are the owner's, in a few words."""
        self.control: LocalControl | None = None
        self._limits = limits
        self._live: Live | None = None
        self._has_keys = False
        self._last_logged = 0.0
        self.last_status: LocalStatus | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Show the panel and obey keys while the block runs, if this is a terminal."""
        if not errors.is_terminal:
            yield
            return
        with (
            Live(console=errors, auto_refresh=False, transient=True) as live,
            read_keys(self._obey_key) as has_keys,
        ):
            self._live = live
            self._has_keys = has_keys
            yield

    def show(self, status: LocalStatus) -> None:
        """Show a status."""
        self.last_status = status
        self._update_panel(status)
        pause = LOG_SECONDS if self._live is None else FILE_SECONDS
        if time.monotonic() - self._last_logged > pause:
            self._last_logged = time.monotonic()
            status_log.info("%s", format_status_line(status))

    def _update_panel(self, status: LocalStatus) -> None:
        if self._live is None:
            return
        try:
            self._live.update(self._build_panel(status), refresh=True)
        except OSError as error:  # the terminal is gone: training does not need it
            log.debug("the status cannot be printed: %s", error)
            silence_terminals()

    def _build_panel(self, status: LocalStatus) -> Any:
        is_ascii = not (errors.encoding or "").lower().startswith("utf")
        return build_panel(status, self._limits, self._describe_keys(), errors.width, is_ascii)

    def _describe_keys(self) -> str:
        if not self._has_keys or self.control is None:
            return ""
        return "r resume  q stop" if self.control.is_paused else "p pause  P 1 h  q stop"

    def _obey_key(self, key: str) -> None:
        """Pause, resume or stop the worker; called by the thread that reads keys."""
        if key in ("q", "Q"):
            _thread.interrupt_main(signal.SIGINT)  # as Ctrl-C does
        elif self.control is not None and key in ("p", "P", "r", "R"):
            if key == "p":
                self.control.pause()
            elif key == "P":
                self.control.pause(LocalPause(time.time() + KEY_PAUSE_SECONDS))
            else:
                self.control.resume()
            if self.last_status is not None:
                self._update_panel(self.last_status)


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
