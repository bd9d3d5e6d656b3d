"""Run `barnraise service …`: start training with the computer."""

import getpass
import logging
import os
import platform
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from barnraise.cli.addresses import RunAddress, parse_run_address, run_argument
from barnraise.cli.chosen_runs import (
    ChosenRun,
    TurnOptions,
    find_next_run,
    find_runs,
    parse_shares,
)
from barnraise.cli.console import configure_logging, new_table, out
from barnraise.cli.control import stop_worker
from barnraise.cli.help_format import HelpfulTyper
from barnraise.cli.join import WorkerOptions, run_worker
from barnraise.cli.log_file import LOG_FOLDER, WorkerLogHandler, logs
from barnraise.cli.machine_options import HomeOption, MachineOptions, open_state_dir
from barnraise.cli.mounts import find_mount
from barnraise.cli.option_groups import expand_option_groups
from barnraise.cli.resource_options import LimitOptions
from barnraise.cli.run_folders import RunFolder, list_run_folders
from barnraise.cli.service.managers import ServiceManager, ServiceState, choose_manager
from barnraise.cli.service.refusals import ServiceFacts, find_refusal, read_boot_mounts
from barnraise.cli.service.service_record import (
    SERVICE_FILE,
    ServiceRecord,
    choose_service_name,
)
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
CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))
MOUNT_TABLE = Path("/etc/fstab")
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
service.command()(logs)


@service.command()
@expand_option_groups
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
    name = choose_service_name(state_dir.path)
    manager = choose_manager(name, state_dir.path, is_system=as_system)
    refusal = find_refusal(gather_facts(state_dir.path, manager, wants_system=as_system))
    if refusal:
        raise StateError(refusal)
    installed = ServiceRecord.load(state_dir.path)
    if installed is not None and manager.read_state().is_installed:
        raise StateError(
            f"a service is installed already ({manager.place}): `barnraise service status` shows "
            "it, and `barnraise service remove` removes it"
        )
    refuse_other_worker(state_dir, "; the service then starts one")
    chosen = _choose_runs(state_dir, runs or [], turns)
    hardware = machine.hardware and str(machine.hardware.resolve())
    options = {"device": machine.device, "threads": machine.threads, "hardware": hardware}
    record = ServiceRecord(
        name=name,
        runs=[run.id for run in chosen],
        share=turns.share,
        follow_next=turns.follow_next,
        is_system=as_system,
        options={option: value for option, value in options.items() if value},
    )
    record.save(state_dir.path)
    try:
        manager.install(describe_service(state_dir.path, record))
    except StateError:
        manager.remove()
        (state_dir.path / SERVICE_FILE).unlink()
        raise
    titles = ", ".join(escape(run.title) for run in chosen)
    out.print(f"The service is installed and trains [bold]{titles}[/].", soft_wrap=True)
    starts = f"It starts {manager.starts}. {manager.linger_sentence}"
    out.print(starts, "Look: barnraise service status", sep="\n", soft_wrap=True)


def _choose_runs(
    state_dir: StateDir, runs: list[RunAddress], turns: TurnOptions
) -> list[ChosenRun]:
    """Return the runs that the service trains: those named, the last one, or the next open one.

    Raises:
        BarnraiseError: there is none, one has ended, or the shares make no sense.
    """
    if not runs:
        statuses = {folder.path.name: folder.status for folder in list_run_folders(state_dir)}
        going_on = {
            run: run_status.at
            for run, run_status in statuses.items()
            if run_status is not None and run_status.activity is not Activity.FINISHED
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


def describe_service(home: Path, record: ServiceRecord) -> ServiceText:
    """Return what the service manager starts for a state directory."""
    program = Path(sys.executable)
    windowless = program.with_name("pythonw.exe")
    if sys.platform == "win32" and windowless.exists():
        program = windowless
    path = home.resolve()
    user = path.owner() if record.is_system else ""
    if sys.platform == "win32":
        user = getpass.getuser()
    return ServiceText(
        name=record.name,
        description=f"Barnraise: trains in the runs of {path}",
        command=(str(program), "-m", "barnraise", "service", "run", "--home", str(path)),
        folder=str(path),
        environment={name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ},
        user=user,
    )


def gather_facts(home: Path, manager: ServiceManager, *, wants_system: bool) -> ServiceFacts:
    """Gather what decides whether a service can be installed."""
    mount = find_mount(Path.home())
    return ServiceFacts(
        system=sys.platform,
        is_root=sys.platform != "win32" and os.geteuid() == 0,
        wants_system=wants_system,
        has_systemd=SYSTEMD_MARK.is_dir(),
        is_manager_reachable=manager.is_reachable,
        is_container=any(mark.exists() for mark in CONTAINER_MARKS) or "container" in os.environ,
        kernel=platform.release(),
        home=find_mount(home),
        person_home=mount.point if mount is not None else "/",
        mounted_at_boot=read_boot_mounts(
            MOUNT_TABLE.read_text(errors="replace") if MOUNT_TABLE.exists() else ""
        ),
    )


@service.command("run", hidden=True)
def run_service(home: HomeOption = None) -> None:
    """Train as the service: what the system's service manager starts.

    A run that has ended, and a refusal that another start would only repeat, end it in order.
    """
    state_dir = open_state_dir(home)
    record = _load_record(state_dir)
    options: dict[str, Any] = record.options | {"home": home}
    if "hardware" in options:
        options["hardware"] = Path(options["hardware"])
    try:
        run_worker(
            [parse_run_address(run) for run in record.runs],
            MachineOptions(**options),
            WorkerOptions(),
            TurnOptions(record.share, record.follow_next),
            LimitOptions(),
        )
    except BarnraiseError as error:
        if not logging.getLogger().handlers:
            configure_logging(WorkerLogHandler(state_dir.path / LOG_FOLDER))
        log.error("%s", error)
        is_final = isinstance(error, CoordinatorError | PlanError | ExcludedError)
        if isinstance(error, CoordinatorUnreachableError) or not is_final:
            raise typer.Exit(1) from None
        log.info("the service stops: barnraise service remove")


@service.command()
def status(home: HomeOption = None) -> None:
    """Show whether the service is installed and runs, and what it trains."""
    state_dir = open_state_dir(home)
    record = _load_record(state_dir)
    manager = _find_manager(state_dir, record)
    state = manager.read_state()
    worker = find_other_worker(state_dir.run_folders())
    is_running = state.is_running or (worker is not None and state.pid == 0)
    folders = {folder.path.name: folder for folder in list_run_folders(state_dir)}
    titles = [folders[run].name if run in folders else run for run in record.runs]
    if record.follow_next:
        titles.append("then the site's next open run")
    table = new_table(show_header=False)
    table.add_row("Service", _describe_state(state, is_running))
    if state.pid:
        table.add_row("Process", str(state.pid))
    table.add_row("Runs", escape(", ".join(titles)))
    table.add_row("Starts", manager.starts)
    table.add_row("Place", escape(manager.place))
    out.print(table)
    if not is_running and all(_has_ended(folders.get(run)) for run in record.runs):
        out.print("Its run has ended: barnraise service remove, or install it for another run.")


def _describe_state(state: ServiceState, is_running: bool) -> str:
    if not state.is_installed:
        return "not known to the system: barnraise service install installs it again"
    if is_running:
        return "running"
    return "has crashed too often: barnraise service logs" if state.has_failed else "stopped"


def _has_ended(folder: RunFolder | None) -> bool:
    run_status = folder.status if folder is not None else None
    return run_status is not None and run_status.activity is Activity.FINISHED


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
    record = _load_record(state_dir)
    for folder in list_run_folders(state_dir):
        if folder.is_running:  # ending a task of Windows would kill it
            stop_worker(folder)
    _find_manager(state_dir, record).remove()
    (state_dir.path / SERVICE_FILE).unlink(missing_ok=True)


def _load_record(state_dir: StateDir) -> ServiceRecord:
    record = ServiceRecord.load(state_dir.path)
    if record is None:
        raise StateError("no service is installed here: barnraise service install RUN")
    return record


def _find_manager(state_dir: StateDir, record: ServiceRecord) -> ServiceManager:
    return choose_manager(record.name, state_dir.path, is_system=record.is_system)
