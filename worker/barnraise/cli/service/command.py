"""Run `barnraise service …`: start training with the computer."""

import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from barnraise.cli.addresses import RunAddress, run_argument
from barnraise.cli.chosen_runs import (
    ChosenRun,
    RunsArgument,
    TurnOptions,
    find_next_run,
    find_runs,
    parse_shares,
)
from barnraise.cli.console import new_table, out
from barnraise.cli.control import stop_worker
from barnraise.cli.help_format import HelpfulTyper
from barnraise.cli.join import WorkerOptions, join
from barnraise.cli.log_file import configure_worker_logging, logs
from barnraise.cli.machine_options import HomeOption, MachineOptions, open_state_dir
from barnraise.cli.mounts import find_mount
from barnraise.cli.resource_options import LimitOptions
from barnraise.cli.run_folders import RunFolder, list_run_folders
from barnraise.cli.service.managers import (
    ServiceManager,
    ServiceState,
    choose_manager,
    choose_service_name,
)
from barnraise.cli.service.refusals import ServiceFacts, find_refusal, read_boot_mounts
from barnraise.cli.service.service_texts import ServiceText
from barnraise.cli.site_access import open_site
from barnraise.errors import (
    BarnraiseError,
    CoordinatorError,
    CoordinatorUnreachableError,
    ExcludedError,
    PlanError,
    StateError,
)
from barnraise.protocol.certificates import VARIABLES as CERTIFICATE_VARIABLES
from barnraise.protocol.enums import Activity
from barnraise.state_dir import StateDir
from barnraise.training.local_control import find_other_worker, refuse_other_worker

log = logging.getLogger("barnraise")

SYSTEMD_MARK = Path("/run/systemd/system")  # exists where systemd has started the machine
MOUNT_TABLE = Path("/etc/fstab")
NEXT = "--next"  # the option of `TurnOptions`, as the service's command has it
# What a worker needs of the environment in which the service is installed.
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
PASSED_VARIABLES = (
    *PROXIES,
    *(name.upper() for name in PROXIES),
    *CERTIFICATE_VARIABLES,
    "BARNRAISE_HARDWARE",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "PYTHONPATH",
)

service = HelpfulTyper(no_args_is_help=True, help="Train whenever this computer runs.")


@service.command()
def install(
    runs: Annotated[
        list[RunAddress] | None,
        run_argument("Runs to train (default: the one that this machine trained last)."),
    ] = None,
    *,
    turns: TurnOptions,
    machine: MachineOptions,
    as_system: Annotated[
        bool, typer.Option("--system", help="Install for the whole machine, as root, on Linux.")
    ] = False,
) -> None:
    """Start training when you log in, with a low priority, and again after a crash.

    Example: barnraise service install first-barn --next
    """
    state_dir = open_state_dir(machine.home)
    manager = choose_manager(state_dir.path, is_system=as_system)
    facts = gather_facts(state_dir.path, manager)
    if refusal := find_refusal(replace(facts, wants_system=as_system)):
        raise StateError(refusal)
    installed = find_service(state_dir)
    if installed is not None and installed.read_state().is_installed:
        raise StateError(
            f"a service is installed already ({installed.place}): `barnraise service status` shows "
            "it, and `barnraise service remove` removes it"
        )
    refuse_other_worker(state_dir, "; the service then starts one")
    chosen = _choose_runs(state_dir, runs or [], turns)
    arguments = _list_arguments(chosen, turns, machine)
    try:
        service_text = describe_service(state_dir.path, arguments)
        if as_system:
            service_text = replace(service_text, user=state_dir.path.resolve().owner())
        manager.install(service_text)
    except StateError:
        manager.remove()
        raise
    titles = ", ".join(escape(run.title) for run in chosen)
    out.print_sentence(
        f"The service is installed and trains [bold]{titles}[/]. It starts {manager.starts}. "
        f"{manager.linger_sentence}\nLook: barnraise service status"
    )


def _choose_runs(
    state_dir: StateDir, runs: list[RunAddress], turns: TurnOptions
) -> list[ChosenRun]:
    """Return the runs that the service trains: those named, the last one, or the next open one.

    Raises:
        BarnraiseError: there is none, one has ended, or the shares make no sense.
    """
    if not runs:
        going_on = {
            folder.path.name: folder.status.at
            for folder in list_run_folders(state_dir)
            if folder.status is not None and not _has_ended(folder)
        }
        runs = [RunAddress(max(going_on, key=going_on.__getitem__))] if going_on else []
    parse_shares(turns.share, len(runs))
    for run in runs:
        open_site(state_dir, run)
    chosen = find_runs(state_dir, [run.name for run in runs], skip_ended=turns.follow_next)
    if not chosen and turns.follow_next:
        next_run = find_next_run(state_dir, ())
        chosen = [next_run] if next_run is not None else []
    if not chosen:
        raise StateError(
            "no run is named, and this machine has trained none that goes on: "
            "barnraise service install RUN"
        )
    return chosen


def _list_arguments(
    runs: list[ChosenRun], turns: TurnOptions, machine: MachineOptions
) -> list[str]:
    """Return the arguments with which the service trains these runs."""
    options = {
        "--share": turns.share,
        "--device": machine.device,
        "--hardware": machine.hardware and machine.hardware.resolve(),
    }
    given = [str(part) for option in options.items() if option[1] for part in option]
    return [*(run.id for run in runs), *given, *([NEXT] if turns.follow_next else [])]


def describe_service(home: Path, arguments: list[str]) -> ServiceText:
    """Return what the service manager starts for a state directory."""
    program = Path(sys.executable)
    windowless = program.with_name("pythonw.exe")
    if sys.platform == "win32" and windowless.exists():
        program = windowless
    path = home.resolve()
    command = (str(program), "-m", "barnraise", "service", "run")
    return ServiceText(
        name=choose_service_name(home),
        description=f"Barnraise: trains in the runs of {path}",
        command=(*command, *arguments, "--home", str(path)),
        folder=str(path),
        environment={name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ},
        user=os.environ.get("USERNAME", "") if sys.platform == "win32" else "",
    )


def gather_facts(home: Path, manager: ServiceManager) -> ServiceFacts:
    """Gather what decides whether a service can be installed."""
    # Where a person's own home is, it is mounted before the person's services start.
    persons = find_mount(Path.home())
    table = MOUNT_TABLE.read_text(errors="replace") if MOUNT_TABLE.exists() else ""
    return ServiceFacts(
        system=sys.platform,
        is_root=sys.platform != "win32" and os.geteuid() == 0,
        has_systemd=SYSTEMD_MARK.is_dir(),
        is_manager_reachable=manager.is_reachable,
        home=find_mount(home),
        boot_mounts=["/", *([persons.point] if persons else []), *read_boot_mounts(table)],
    )


@service.command("run", hidden=True)
def run_service(runs: RunsArgument, machine: MachineOptions, turns: TurnOptions) -> None:
    """Train as the service: what the system's service manager starts.

    A run that has ended, and a refusal that another start would only repeat, end it in order.
    """
    try:
        join(runs, machine, WorkerOptions(), turns, LimitOptions())
    except BarnraiseError as error:
        if not logging.getLogger().handlers:
            configure_worker_logging(open_state_dir(machine.home))
        log.error("%s", error)
        is_final = isinstance(error, CoordinatorError | PlanError | ExcludedError)
        if isinstance(error, CoordinatorUnreachableError) or not is_final:
            raise typer.Exit(1) from None
        log.info("the service stops: barnraise service remove")


@service.command()
def status(home: HomeOption = None) -> None:
    """Show whether the service is installed and runs, and what it trains."""
    state_dir = open_state_dir(home)
    manager = _require_service(state_dir)
    state = manager.read_state()
    worker = find_other_worker(state_dir.run_folders())
    # Windows does not say whether the task's program runs.
    is_running = state.is_running or (worker is not None and sys.platform == "win32")
    text = manager.read_text()
    folders = [folder for folder in list_run_folders(state_dir) if folder.path.name in text]
    titles = [folder.name for folder in folders]
    if NEXT in text:
        titles.append("then the site's next open run")
    table = new_table(show_header=False)
    table.add_row("Service", _describe_state(state, is_running))
    if worker is not None:
        table.add_row("Worker", f"process {worker.pid}")
    table.add_row("Runs", escape(", ".join(titles)))
    table.add_row("Starts", manager.starts)
    table.add_row("Place", escape(manager.place))
    out.print(table)
    if folders and not is_running and all(map(_has_ended, folders)):
        out.print("Its run has ended: barnraise service remove, or install it for another run.")


service.command()(logs)


def _describe_state(state: ServiceState, is_running: bool) -> str:
    if not state.is_installed:
        return "not known to the system: barnraise service install installs it again"
    if is_running:
        return "running"
    return "has crashed too often: barnraise service logs" if state.has_failed else "stopped"


def _has_ended(folder: RunFolder) -> bool:
    return folder.status is not None and folder.status.activity is Activity.FINISHED


@service.command()
def remove(home: HomeOption = None) -> None:
    """Stop the service and remove it. The runs and what they have trained stay."""
    state_dir = open_state_dir(home)
    remove_service(state_dir)
    out.print("The service is removed. From a terminal: [bold]barnraise join RUN[/]")


def remove_service(state_dir: StateDir) -> None:
    """Stop the service, let its worker save its work, and remove all of it.

    Raises:
        StateError: there is none, or the system refuses.
    """
    manager = _require_service(state_dir)
    for folder in list_run_folders(state_dir):
        if folder.is_running:  # ending a task of Windows would kill it
            stop_worker(folder)
    manager.remove()


def find_service(state_dir: StateDir) -> ServiceManager | None:
    """Return the manager of this state directory's service; None if no service is installed."""
    managers = [choose_manager(state_dir.path, is_system=is_system) for is_system in (False, True)]
    return next((manager for manager in managers if manager.path.exists()), None)


def _require_service(state_dir: StateDir) -> ServiceManager:
    manager = find_service(state_dir)
    if manager is None:
        raise StateError("no service is installed here: barnraise service install RUN")
    return manager
