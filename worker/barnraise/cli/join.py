"""Run `barnraise join`: train in a run."""

import _thread
import atexit
import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from rich.live import Live
from rich.markup import escape

from barnraise.cli.chosen_runs import (
    ChosenRun,
    RunsArgument,
    TurnOptions,
    find_next_run,
    find_runs,
    parse_shares,
)
from barnraise.cli.cluster_rank import (
    lead_ranks,
    measure_ranks,
    obey_rank_0,
    without_lost_ranks,
)
from barnraise.cli.console import (
    STATUS_LOGGER,
    errors,
    out,
)
from barnraise.cli.doctor.command import run_first_checkup
from barnraise.cli.keys import read_keys
from barnraise.cli.last_words import compose_last_words
from barnraise.cli.limits import check_fit, explain_limits, summarise_limits
from barnraise.cli.log_file import configure_worker_logging
from barnraise.cli.machine_options import (
    MachineOptions,
    hardware_view,
    open_state_dir,
)
from barnraise.cli.option_groups import option
from barnraise.cli.panel import build_panel, format_status_line
from barnraise.cli.resource_options import LimitOptions
from barnraise.cli.signals import silence_terminals, stop_on_signals
from barnraise.cli.site_access import open_site
from barnraise.errors import CoordinatorError, PlanError, StateError
from barnraise.formats import format_bytes
from barnraise.planning.crew import advise_crew
from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import Limits, merge_limits
from barnraise.protocol.coordinator_messages import RunView, TextManifest
from barnraise.protocol.signing import open_signed
from barnraise.spec import RunSpec
from barnraise.state_dir import SiteMembership, StateDir
from barnraise.training.limits.machine_facts import FactsReader
from barnraise.training.limits.rule_watch import RuleWatch
from barnraise.training.local_control import LocalControl, LocalPause
from barnraise.training.local_status import LocalStatus
from barnraise.training.run_turns import Turn, train_in_turns

if TYPE_CHECKING:
    from barnraise.training.join import JoinedRun
    from barnraise.training.train import Worker

log = logging.getLogger("barnraise")
status_log = logging.getLogger(STATUS_LOGGER)

# The lowest priority: other programs that use all cores lose 4 % of them; with nice 10 it was 11 %.
NICENESS = 19
# Linux gives each session an equal share of the CPU; priorities count only within a session.
AUTOGROUP = Path("/proc/self/autogroup")
CREW_PANEL = "A crew: several machines that act as one"
KEY_PAUSE_SECONDS = 3600.0  # that the panel's key P pauses for
LOG_SECONDS = 10.0  # between two lines of the status in a log that people read
FILE_SECONDS = 60.0  # between two lines of the status in the log file of a terminal's worker


@dataclass(frozen=True)
class WorkerOptions:
    """How a worker joins and behaves on its machine."""

    port: int = option(0, "UDP port for peers; 0: any free one.", min=0, max=65535)
    polite: bool = option(True, "Let the machine's other programs go first.", "--polite/--eager")
    trust_one: bool = option(
        False,
        "On the first join, believe the weights of the connected volunteers, even of a single "
        "one, though the site does not confirm them.",
        "--trust-one",
    )
    crew: bool = option(
        False,
        "Lead a crew: print a code with which up to 15 other machines train a part of the model "
        "each.",
        "--crew",
        rich_help_panel=CREW_PANEL,
    )
    members: int | None = option(
        None,
        "Machines to wait for besides this one (default: until those that came are enough, and "
        "nobody has come for 20 s).",
        min=1,
        max=15,
        rich_help_panel=CREW_PANEL,
    )
    boundary: int | None = option(
        None,
        "Bits of what passes between the machines: 32 (exact), 16 or 8 (default: as the lines "
        "need).",
        rich_help_panel=CREW_PANEL,
    )


def join(
    runs: RunsArgument,
    machine: MachineOptions,
    worker_options: WorkerOptions,
    turns: TurnOptions,
    resources: LimitOptions,
) -> None:
    """Train in a run until it ends or you press Ctrl-C; in several, one after another by time.

    Ctrl-C saves the work; the next join continues it. With the run's address, a machine that is
    not enrolled yet enrols first. Limits given here are saved, as by `barnraise limits`.

    Example: barnraise join https://train.example.org/runs/first-barn
    """
    if worker_options.polite:
        lower_priority()
    # What can be refused is refused before anything that takes time.
    shares = parse_shares(turns.share, len(runs))
    if worker_options.crew and len(runs) > 1:
        raise StateError("a crew trains one run: name one, and let other machines join the others")
    state_dir = open_state_dir(machine.home)
    first_limits = state_dir.limits
    new_limits = resources.apply_to(first_limits)
    names = [run.name for run in runs]
    obey_rank_0(names, new_limits)  # only rank 0 of a cluster knows the site and the peers
    memberships = [open_site(state_dir, run) for run in runs]
    chosen = find_runs(state_dir, names, skip_ended=turns.follow_next)
    if not worker_options.crew and (machine.device or new_limits.has_sizes):
        for run in chosen:
            _check_request(run.view, machine, new_limits, state_dir.path)

    configure_worker_logging(state_dir)
    leaving = stop_on_signals()
    for run in chosen:
        _announce_run(run, memberships[0])
    run_first_checkup(state_dir)
    display = StatusDisplay()
    by_name = dict(zip(names, shares, strict=True))
    found = {run.id: run for run in chosen}

    def train_runs(session: TrainingSession) -> None:
        def train(run: str, turn: Turn) -> None:
            session.train(found[run], turn)

        time_shares = {run.id: by_name[run.name] for run in chosen}
        with display.open(), session.rules.running():
            while train_in_turns(time_shares, leaving, train) and turns.follow_next:
                next_run = find_next_run(state_dir, found)
                if next_run is None:
                    log.info("no other run is open on %s", memberships[0].mirror.name)
                    return
                found[next_run.id] = next_run
                time_shares = {next_run.id: 1.0}
                _announce_run(next_run, memberships[0])

    from barnraise.training.card_restart import run_with_restarts  # imports torch

    with lead_ranks(names, new_limits):
        hardware = measure_ranks(state_dir, machine, new_limits)
        limits = first_limits, new_limits
        session = TrainingSession(state_dir, hardware, limits, worker_options, display)
        run_with_restarts(partial(train_runs, session), leaving.wait, time.time)
    for last_words in session.last_words.values():
        out.print(*last_words, sep="\n", soft_wrap=True)


def _announce_run(run: ChosenRun, membership: SiteMembership) -> None:
    """Print which run this machine joins, and how much disk its text takes."""
    text = ""
    if run.view is not None and run.view.manifest is not None:
        manifest = open_signed(run.view.manifest, "manifest", TextManifest)
        text = f"; its text takes {format_bytes(manifest.text_bytes)} of disk"
    site_name = escape(membership.mirror.name)
    out.print_sentence(f"Joining [bold]{escape(run.title)}[/] on {site_name}{text} …")


class TrainingSession:
    """What the runs of one `barnraise join` share: the machine, its limits and the display.

    Attributes:
        last_words: what to print in the end, by run.
        rules: when this machine may train.
    """

    def __init__(
        self,
        state_dir: StateDir,
        hardware: Hardware,
        limits: tuple[Limits, Limits],
        options: WorkerOptions,
        display: "StatusDisplay",
    ) -> None:
        """Prepare to train; `limits` are the owner's, and those with the options of this join."""
        self.last_words: dict[str, list[str]] = {}
        gpus = [card.device_index for card in hardware.cards if card.device == "cuda"]
        self.rules = RuleWatch(state_dir, FactsReader(gpu_indices=gpus))
        self._state_dir = state_dir
        self._hardware = hardware
        self._first_limits = limits[0]
        self._new_limits: Limits | None = limits[1]  # None: the machine's file has them
        self._options = options
        self._display = display

    def train(self, run: ChosenRun, turn: Turn) -> None:
        """Train a run until it ends, or its turn does.

        Raises:
            BarnraiseError: the run cannot be trained here, or has no place for this machine.
        """
        # Importing torch takes seconds, so that only the commands that need it do so.
        from barnraise.training.memory_retry import run_within_memory
        from barnraise.training.memory_watch import MemoryWatch

        def show(status: LocalStatus) -> None:
            turn.observe(status)
            self._display.show(status, summarise_limits(self.rules.limits))

        # Its owner may have set others since the last turn.
        owners_limits = self._new_limits or self._state_dir.limits
        watch = MemoryWatch(owners_limits)

        def create(limits: Limits) -> "Worker | None":
            worker = self._create_worker(run, turn, limits, show)
            if worker is not None:
                if limits == self._new_limits:  # and not smaller ones after a shortage of memory
                    # The owner may have set others while `join` waited for the run's launch.
                    now = self._state_dir.limits
                    self._state_dir.limits = merge_limits(self._first_limits, limits, now)
                    self._new_limits = None
                worker.watch_memory(watch)
                worker.watch_rules(self.rules)
                worker.end_after_round(turn.end_with_round)
            return worker

        worker = run_within_memory(create, owners_limits, watch)
        if worker is None:
            return
        if worker.reporter.refused:
            raise CoordinatorError(worker.reporter.refused)
        self.last_words[run.id] = compose_last_words(
            run.address,
            worker.joined.folder.path,
            self._display.last_status,
            turn.leaving.is_set(),
            self._state_dir.membership,
        )

    def _create_worker(
        self, run: ChosenRun, turn: Turn, limits: Limits, show: Callable[[LocalStatus], None]
    ) -> "Worker | None":
        """Join the run and plan the training; None if the turn ends before the launch."""
        from barnraise.peering.transports.iroh_transport import IrohTransport
        from barnraise.swap.hardware_probe import measure_free
        from barnraise.training.join import join_run
        from barnraise.training.mixing_worker import MixingWorker
        from barnraise.training.running_mark import create_within_memory
        from barnraise.training.train import Worker
        from barnraise.training.warm_start import fetch_initial_weights

        hardware, leaving = self._hardware, turn.leaving
        fetch_weights = partial(fetch_initial_weights, self._state_dir, leaving, lambda: hardware)
        joined = join_run(self._state_dir, run.id, leaving, hardware_view(hardware), fetch_weights)
        if joined is None:
            return None
        joined = replace(joined, trust_one=self._options.trust_one)
        self._display.control = LocalControl(joined.folder.path)
        transport = IrohTransport(joined.coordinator.identity.secret, port=self._options.port)

        if self._options.crew:
            return self._form_crew(joined, leaving, limits, show)

        def create(limits: Limits) -> Worker:
            worker_class = MixingWorker if joined.spec.recipe.mixes_weights else Worker
            # What is free changes between two attempts.
            free = measure_free(hardware)
            allowed = without_lost_ranks(limits)
            return worker_class(joined, leaving, free, allowed, show, transport)

        try:
            worker = create_within_memory(joined.folder.path, limits, create)
        except PlanError as error:
            joined.folder.close()
            refusal = explain_limits(error, limits)
            if not joined.spec.recipe.mixes_weights:
                refusal = PlanError(f"{refusal}. {advise_crew(run.name)}")
            raise refusal from None
        return worker

    def _form_crew(
        self,
        joined: "JoinedRun",
        leaving: threading.Event,
        limits: Limits,
        show: Callable[[LocalStatus], None],
    ) -> "Worker | None":
        """Wait for a crew's machines, and return its lead's worker; None if the wait was stopped.

        Raises:
            StateError: the run's machines cannot form crews.
        """
        from barnraise.peering.transports.iroh_transport import (
            IrohTransport,
            find_free_port,
            wait_until_free,
        )
        from barnraise.swap.hardware_probe import measure_free
        from barnraise.training.crew.crew_code import CrewRecord
        from barnraise.training.crew.crew_worker import (
            CrewOptions,
            CrewWorker,
            describe_request,
            form_crew,
        )

        if joined.spec.recipe.mixes_weights:
            joined.folder.close()
            raise StateError(
                "the machines of this run average their weights in every step: no crew can be one "
                "of them"
            )
        free = measure_free(self._hardware)
        secret = joined.coordinator.identity.secret
        record = CrewRecord.load(joined.folder.path)
        port = self._options.port or record.port or find_free_port()
        options = CrewOptions(self._options.members, self._options.boundary, port=port)
        crew = form_crew(
            joined,
            describe_request(joined, free, limits),
            options,
            IrohTransport(secret, port=port),
            leaving.is_set,
            _print_crew_code,
        )
        if crew is None:
            joined.folder.close()
            return None
        wait_until_free(port)
        transport = IrohTransport(secret, port=port)
        return CrewWorker(crew, joined, leaving, (free, limits), show, transport)


def _print_crew_code(code: str) -> None:
    out.print(
        f"On each other machine of the crew, run\n\n  barnraise crew join {code}\n\nWaiting …",
        soft_wrap=True,
        highlight=False,
    )


def _check_request(
    view: RunView | None, machine: MachineOptions, limits: Limits, folder: Path
) -> None:
    """Refuse a device that is not here, or limits that are too low, before the measuring.

    Raises:
        StateError: there is no such device.
        PlanError: the run's model does not fit.
    """
    from barnraise.swap.device import choose_device

    device = choose_device(machine.device).name
    if device == "cpu" and view is not None:
        check_fit(RunSpec.from_json(view.spec), limits, folder)


class StatusDisplay:
    """A worker's status: a panel at the end of a terminal, below the log, or lines in a log.

    Attributes:
        control: pauses and resumes the worker; None until the run is joined.
        last_status: None before the first one.
    """

    def __init__(self) -> None:
        """Show nothing yet."""
        self.control: LocalControl | None = None
        self._limits = ""
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

    def show(self, status: LocalStatus, limits: str) -> None:
        """Show a status and the owner's limits, in a few words."""
        self.last_status, self._limits = status, limits
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
                self.control.pause(LocalPause(until=time.time() + KEY_PAUSE_SECONDS))
            else:
                self.control.resume()
            if self.last_status is not None:
                self._update_panel(self.last_status)


def lower_priority() -> None:
    """Let all other programs of this machine go first; while they are idle, training is as fast.

    Call it before any thread is started, because threads inherit the priority. Linux shares time
    among sessions first, so that of a terminal is lowered until this process ends.
    """
    process = psutil.Process()
    if psutil.WINDOWS:
        process.nice(psutil.IDLE_PRIORITY_CLASS)
    else:
        process.nice(max(NICENESS, process.nice()))
    # The file is missing on other systems, and where Linux shares time by processes alone; it is
    # empty for a process that no session was created for, as in some containers.
    with contextlib.suppress(OSError):
        if before := AUTOGROUP.read_text().split():
            AUTOGROUP.write_text(str(NICENESS))
            atexit.register(_set_session_priority, before[-1])


def _set_session_priority(niceness: str) -> None:
    with contextlib.suppress(OSError):
        AUTOGROUP.write_text(niceness)
