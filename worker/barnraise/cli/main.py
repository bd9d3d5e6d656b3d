"""The `barnraise` command: what a volunteer types.

login URL · runs · machines · plan · limits · join RUN · prepare RUN PATH… · status · export RUN FOLDER
fetch RUN FOLDER · serve RUN · verdict RUN
"""

import contextlib
import json
import logging
import os
import platform
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.live import Live
from rich.logging import RichHandler
from rich.markup import escape
from rich.table import Table
from rich.text import Text as Line

from barnraise import __version__
from barnraise.cli import runs
from barnraise.cli.plan import (
    ClippingOption,
    DeviceMemoryOption,
    DeviceOption,
    DiskOption,
    EightOption,
    HardwareOption,
    HomeOption,
    JsonOption,
    MemoryOption,
    SafetyOption,
    ThreadsOption,
    UplinkOption,
    WritesOption,
    hardware_view,
    limited,
    measure,
)
from barnraise.cli.plan import app as planning
from barnraise.cli.verdict import app as judging
from barnraise.coordinator_client.client import CoordinatorClient
from barnraise.errors import (
    BarnraiseError,
    CoordinatorError,
    CoordinatorUnreachableError,
    StateError,
)
from barnraise.formats import format_byte_rate
from barnraise.protocol.coordinator_messages import EnrolmentStatus, MachineDescription
from barnraise.state_dir import SiteMembership, StateDir

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Train a GPT together, each on their own computer.",
)
app.add_typer(planning)
app.add_typer(judging)
app.add_typer(runs.runs, name="runs")
app.add_typer(runs.machines, name="machines")
out = Console(highlight=False)
errors = Console(stderr=True, highlight=False)
NICER = 10  # steps, where priorities are counted so
TERMINAL = Path(
    "/proc/self/autogroup"
)  # Linux gives each session an equal share; priorities count within it


def main() -> None:
    """Expected failures are one sentence on stderr and exit code 1; a traceback is a bug of ours."""
    try:
        app()
    except (BarnraiseError, OSError) as error:
        errors.print(f"[bold red]barnraise:[/] {escape(str(error))}", soft_wrap=True)
        raise SystemExit(1) from None


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if show:
        out.print(f"barnraise {__version__}")
        raise typer.Exit


@app.command()
def login(
    url: Annotated[str, typer.Argument(help="The coordinator's address, as in the browser.")],
    name: Annotated[str, typer.Option(help="What to call this machine there.")] = "",
    home: HomeOption = None,
) -> None:
    """Enrol this machine at a site: it shows a code that you approve in the browser."""
    place = StateDir(home or StateDir.default_path())
    coordinator = CoordinatorClient(url if "//" in url else f"https://{url}", place.identity)
    mirror = coordinator.pin_mirror()
    enrolment = coordinator.request_enrolment(machine(name))
    out.print(
        f"Approve this machine on [bold]{escape(mirror.name)}[/]:\n\n"
        f"  {enrolment.url}\n\n  code  [bold]{enrolment.code}[/]\n"
    )
    while (status := answer(coordinator, enrolment.code)).status == "pending":
        time.sleep(enrolment.poll_every)
    if status.status != "approved" or status.machine is None:
        raise CoordinatorError(
            f"the code was {status.status}: run `barnraise login` again for a new one"
        )
    place.save_membership(
        SiteMembership(
            url=coordinator.url, mirror=mirror, machine=status.machine, person=status.person
        )
    )
    out.print(
        f"This machine now works for {escape(status.person) or 'you'}. Next: [bold]barnraise join RUN[/]"
    )


def answer(coordinator: CoordinatorClient, code: str) -> EnrolmentStatus:
    """What became of the code; a coordinator that does not answer just now has not decided."""
    try:
        return coordinator.fetch_enrolment(code)
    except CoordinatorUnreachableError as error:
        errors.print(f"{escape(str(error))}; still waiting", soft_wrap=True)
        return EnrolmentStatus(status="pending")


@app.command()
def join(
    run: Annotated[str, typer.Argument(help="The run's name in its address, or its id.")],
    home: HomeOption = None,
    device: DeviceOption = "",
    threads: ThreadsOption = 0,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="UDP port for peers; 0: any free one.")
    ] = 0,
    memory: MemoryOption = "",
    device_memory: DeviceMemoryOption = "",
    disk: DiskOption = "",
    disk_writes_per_day: WritesOption = "",
    uplink: UplinkOption = "",
    clipping: ClippingOption = "",
    crash_safety: SafetyOption = "",
    moments_8bit: EightOption = None,
    hardware: HardwareOption = None,
    polite: Annotated[
        bool, typer.Option("--polite/--eager", help="Let the machine's other programs go first.")
    ] = True,
) -> None:
    """Train in a run until it ends, or until Ctrl-C: then the work is saved, and the next join goes on from there.

    Limits that are given here last: see `barnraise limits`.
    """
    from barnraise.training.join import (
        join_run,
    )  # torch takes seconds to import: only where it is needed
    from barnraise.training.warm_start import fetch_initial_weights

    if polite:
        lower_priority()
    configure_logging()
    leaving = stop_on_signals()
    place = StateDir(home or StateDir.default_path())
    given = memory, device_memory, disk, disk_writes_per_day, uplink
    place.limits = limits = limited(place.limits, given, clipping, crash_safety, moments_8bit)
    out.print(f"Entering [bold]{escape(run)}[/] on {escape(place.membership.mirror.name)} …")
    measured = measure(place, device, threads, hardware)
    entered = join_run(
        place,
        run,
        leaving,
        hardware_view(measured),
        partial(fetch_initial_weights, place, leaving, lambda: measured),
    )
    if entered is None:
        return
    from barnraise.exchange.network.iroh_transport import IrohTransport
    from barnraise.training.train import Worker

    with Live(console=out, auto_refresh=False, transient=False) as live:
        last = 0.0

        def watch(status: dict[str, Any]) -> None:
            nonlocal last
            if out.is_terminal:
                live.update(line(status), refresh=True)
            elif time.monotonic() - last > 10:
                last = time.monotonic()
                logging.getLogger("barnraise").info("%s", line(status).plain)

        transport = IrohTransport(place.identity.secret, port=port)
        worker = Worker(entered, leaving, measured, limits, watch, transport)
        worker.run()
    if worker.reporter.refused:
        raise CoordinatorError(worker.reporter.refused)
    ended = "Left" if leaving.is_set() else "Finished"
    out.print(f"{ended}. Everything is saved in {entered.folder.path}", soft_wrap=True)


@app.command()
def fetch(
    run: Annotated[str, typer.Argument(help="The run's name in its address, or its id.")],
    folder: Annotated[Path, typer.Argument(help="Where to write the model, for Hugging Face.")],
    digest: Annotated[
        str, typer.Option(help="Of the weights, as the site lists them: others are refused.")
    ] = "",
    home: HomeOption = None,
    hardware: HardwareOption = None,
) -> None:
    """Download a run's weights from its peers, while machines train in it or share it."""
    worker = visitor("ModelFetcher", run, home, hardware)
    worker.run()
    if worker.leaving.is_set():
        return
    if digest and not worker.digest.startswith(digest):
        raise StateError(
            f"the peers hold {worker.digest} at {worker.tokens:,} tokens, and you asked for {digest}"
        )
    out.print(f"BLAKE3 of the weights: {worker.digest}", soft_wrap=True)
    export(run, folder, home)


@app.command()
def serve(
    run: Annotated[str, typer.Argument(help="A run that this machine has trained in.")],
    home: HomeOption = None,
    hardware: HardwareOption = None,
) -> None:
    """Share a run's weights until Ctrl-C, without training."""
    worker = visitor("ModelServer", run, home, hardware)
    out.print("Sharing. Ctrl-C ends it.")
    worker.run()
    if worker.reporter.refused:
        raise CoordinatorError(worker.reporter.refused)


def visitor(kind: str, run: str, home: Path | None, hardware: Path | None) -> Any:
    """A worker of `visiting` in its place. Raises BarnraiseError."""
    from barnraise.training import model_transfer
    from barnraise.training.join import join_run

    configure_logging()
    leaving, place = stop_on_signals(), StateDir(home or StateDir.default_path())
    measured = measure(place, "", 0, hardware)
    entered = join_run(place, run, leaving, hardware_view(measured))
    if entered is None:
        raise typer.Exit
    return getattr(model_transfer, kind)(entered, leaving, measured, place.limits)


@app.command()
def prepare(
    run: Annotated[str, typer.Argument(help="A draft of yours whose text comes from files.")],
    paths: Annotated[
        list[Path], typer.Argument(help="Text files, .jsonl files, or folders of them.")
    ],
    home: HomeOption = None,
) -> None:
    """Prepare your run's text from files of this machine.

    The files stay here: join with this machine, and it serves them to the others.
    """
    from barnraise.training import join as join_module
    from barnraise.training.warm_start import fetch_initial_weights

    configure_logging()
    place = StateDir(home or StateDir.default_path())
    weights = partial(
        fetch_initial_weights, place, stop_on_signals(), lambda: measure(place, "", 0, None)
    )
    view = join_module.prepare_text(place, run, paths, weights)
    tokens = sum(shard.tokens for shard in join_module.open_manifest(view).train)
    out.print(
        f"The text has {tokens:,} tokens. Next, on this machine: [bold]barnraise join {escape(run)}[/]"
    )


@app.command()
def status(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """What this machine has done in each of its runs."""
    place = StateDir(home or StateDir.default_path())
    found = []
    for folder in place.run_folders():
        path = folder / "status.json"
        with contextlib.suppress(
            FileNotFoundError, json.JSONDecodeError
        ):  # a crash may cut it off; no state is in it
            found.append(json.loads(path.read_text()))
    if as_json:
        out.print_json(json.dumps(found))
        return
    for each in found:
        out.print(f"[bold]{escape(each['name'])}[/]", line(each), soft_wrap=True)
        if each.get("neighbours"):
            out.print(neighbours(each))
    if not found:
        out.print("This machine has not trained yet: [bold]barnraise join RUN[/]")


@app.command()
def export(
    run: Annotated[str, typer.Argument(help="The run's id, or its name in its address.")],
    folder: Annotated[
        Path, typer.Argument(help="Where to write config.json and model.safetensors.")
    ],
    home: HomeOption = None,
) -> None:
    """Write this machine's last state of a run for Hugging Face's GPT-2 class."""
    from barnraise.exchange.ledger.blob_store import BlobStore
    from barnraise.protocol.coordinator_messages import TextManifest
    from barnraise.protocol.signing import open_signed
    from barnraise.spec import RunSpec
    from barnraise.training.checkpoint import CheckpointSlots
    from barnraise.training.export import export_model as write
    from barnraise.training.join import find_saved_run
    from barnraise.training.resume import DiskState, read_state_header

    place = StateDir(home or StateDir.default_path())
    kept = find_saved_run(place, run)
    if kept is None or kept.manifest is None:
        raise StateError(f"this machine has never worked on '{run}'")
    folder_of_run = place.path / "runs" / kept.id
    model = RunSpec.from_json(kept.spec).model
    tokenizer = open_signed(kept.manifest, "manifest", TextManifest).tokenizer
    blob = BlobStore(folder_of_run / "blobs").path(tokenizer) if tokenizer else None
    if read_state_header(folder_of_run / "state") is None:
        saved = CheckpointSlots(folder_of_run / "checkpoint").load()
        if saved is None:
            raise StateError(f"this machine has no checkpoint of '{run}' yet")
        write(folder, model, saved[0], blob)
        at = saved[1].tokens
    else:
        with contextlib.closing(
            place.open_run(kept.id)
        ):  # a running worker changes the state on disk while it is read
            state = DiskState(model, folder_of_run / "state")
            write(folder, model, state, blob)
            at = state.header.tokens
            state.close()
    out.print(f"Wrote the weights at {at:,} tokens to {folder}")


def machine(name: str) -> MachineDescription:
    """What this machine says of itself when it enrols."""
    return MachineDescription(
        hostname=(name or platform.node())[:100],
        system=f"{platform.system()} {platform.release()}"[:100],
        processor=(platform.processor() or platform.machine())[:100],
        cores=os.cpu_count() or 0,
        memory_bytes=psutil.virtual_memory().total,
        accelerator=accelerator()[:100],
    )


def accelerator() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def line(status: dict[str, Any]) -> Line:
    """One live line: activity, step, loss, speed, what was sent and received."""
    loss = f"{status['loss']:.3f}" if status["loss"] is not None else "–"
    share = min(1.0, status["ledger_tokens"] / status["token_budget"])
    return Line.assemble(
        (f"{status['activity']:<10}", "bold" if status["activity"] == "training" else "yellow"),
        f" step {status['step']:>6,}  loss {loss:>6}  {status['rate']:>8,.0f} tok/s  ",
        f"↑{status['updates_sent']:>4} ↓{status['updates_received']:>4}  {status['peers']} peers  ",
        trading(status.get("exchange")),  # a folder of an older version does not say
        (f"{share:>4.0%}", "cyan"),
    )


def trading(exchange: dict[str, Any] | None) -> str:
    """Rounds, what is said of an update, what goes over the line."""
    if not exchange:
        return ""
    up, uplink = exchange["sent_rate"], exchange["uplink_rate"]
    of_line = f" ({up / uplink:.0%} of the line)" if uplink > up > 0 else ""
    lag = f"  {exchange['lag']:,} behind" if exchange["lag"] else ""
    return f"{exchange['round_steps']} steps a round, {exchange['bits_per_parameter']:.3g} bits  {format_byte_rate(up)} up{of_line}{lag}  "


def neighbours(status: dict[str, Any]) -> Table:
    """The peers this machine is linked to: what they lack, what goes over the line, whether their weights are ours."""
    table = Table("  peer", "lags", "↑", "↓", "same weights", box=None, pad_edge=False)
    for each in status["neighbours"]:
        agrees = {True: "yes", False: "NO", None: "–"}[each["agrees"]]
        figures = (
            f"{each['lag']:,}",
            format_byte_rate(each["up"]),
            format_byte_rate(each["down"]),
            agrees,
        )
        table.add_row(
            f"  {each['key'][:8]}", *figures, style="bold red" if each["agrees"] is False else None
        )
    return table


def configure_logging() -> None:
    handler: logging.Handler = RichHandler(console=errors, show_path=False, rich_tracebacks=True)
    if not errors.is_terminal:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)


def lower_priority() -> None:
    """Whatever else its owner does with this machine goes first; while they do nothing, training is as fast. Before
    any thread is started: they inherit it."""
    me = psutil.Process()
    me.nice(psutil.BELOW_NORMAL_PRIORITY_CLASS if psutil.WINDOWS else max(NICER, me.nice()))
    with contextlib.suppress(
        OSError
    ):  # not Linux, or one that shares its time out by processes alone
        TERMINAL.write_text(str(NICER))


def stop_on_signals() -> threading.Event:
    """Set by the first Ctrl-C (or SIGTERM); a second one ends the program at once."""
    leaving = threading.Event()

    def leave(number: int, frame: Any) -> None:
        if leaving.is_set():
            raise KeyboardInterrupt
        leaving.set()
        errors.print("Stopping … (Ctrl-C again to stop at once)")

    signal.signal(signal.SIGINT, leave)
    signal.signal(signal.SIGTERM, leave)
    return leaving


if __name__ == "__main__":
    main()
