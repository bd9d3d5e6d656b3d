"""Run `barnraise crew …`: join a crew with its code, and show the crew of this machine."""

import platform
import time
from typing import Annotated

import typer
from rich.markup import escape

from barnraise.cli.addresses import RunAddress
from barnraise.cli.chosen_runs import TurnOptions, find_runs
from barnraise.cli.console import new_table, out, print_json
from barnraise.cli.help_format import HelpfulTyper
from barnraise.cli.join import WorkerOptions, join
from barnraise.cli.log_file import configure_worker_logging
from barnraise.cli.machine_options import (
    HomeOption,
    JsonOption,
    MachineOptions,
    hardware_view,
    measure_machine,
    open_state_dir,
)
from barnraise.cli.resource_options import LimitOptions, ResourceOptions
from barnraise.cli.run_folders import list_run_folders
from barnraise.cli.signals import stop_on_signals
from barnraise.cli.site_access import open_site
from barnraise.errors import StateError
from barnraise.formats import format_bytes, format_duration
from barnraise.planning.hardware import printable_name
from barnraise.protocol.enums import JoinPurpose
from barnraise.training.crew.crew_code import parse_code
from barnraise.training.crew.crew_status import CrewStatus, read_crew_status
from barnraise.training.limits.machine_facts import FactsReader
from barnraise.training.limits.rule_watch import RuleWatch
from barnraise.training.local_control import LocalControl

crew = HelpfulTyper(help="Train as one volunteer with other machines, each with a part.")


@crew.command("join")
def join_crew(
    code: Annotated[str, typer.Argument(help="What `barnraise join RUN --crew` printed.")],
    machine: MachineOptions,
    resources: ResourceOptions,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port for the crew; 0: any free one.")
    ] = 0,
) -> None:
    """Train a part of the model for a crew's lead, until it leaves or you press Ctrl-C.

    The machine must be enrolled at the run's site. It needs no text, and may be too small for the
    run alone. If the lead is lost, this machine may lead the crew in its place.
    """
    crew_code = parse_code(code)
    state_dir = open_state_dir(machine.home)
    limits = resources.apply_to(state_dir.limits)
    open_site(state_dir, RunAddress(crew_code.run))
    find_runs(state_dir, [crew_code.run], skip_ended=False)

    # Importing torch takes seconds, so that only the commands that need it do so.
    from barnraise.peering.transports.iroh_transport import (
        IrohTransport,
        find_free_port,
        wait_until_free,
    )
    from barnraise.swap.hardware_probe import measure_free
    from barnraise.training.crew.crew_membership import CrewMembership
    from barnraise.training.crew.crew_worker import describe_request
    from barnraise.training.join import join_run

    configure_worker_logging(state_dir)
    leaving = stop_on_signals()
    hardware = measure_machine(state_dir, machine, limits)
    view = hardware_view(hardware)
    joined = join_run(state_dir, crew_code.run, leaving, view, purpose=JoinPurpose.CREW)
    if joined is None:
        return
    name = printable_name(platform.node()) or state_dir.identity.key[:8]
    request = describe_request(joined, measure_free(hardware), limits)
    control = LocalControl(joined.folder.path)
    gpus = [card.device_index for card in hardware.cards if card.device == "cuda"]
    rules = RuleWatch(state_dir, FactsReader(gpu_indices=gpus))
    membership = CrewMembership(
        joined,
        crew_code,
        name,
        request,
        lambda: control.is_paused or not rules.decision.may_train,
    )
    port = port or find_free_port()
    with rules.running():
        is_to_lead = membership.run(
            IrohTransport(state_dir.identity.secret, port=port), leaving.is_set
        )
    if is_to_lead:
        wait_until_free(port)
        run = RunAddress(crew_code.run)
        options = WorkerOptions(port=port, crew=True)
        join([run], machine, options, TurnOptions(), LimitOptions(**vars(resources)))


@crew.command("status")
def show_status(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Show this machine's crew: the blocks of each machine, and which machines are connected."""
    state_dir = open_state_dir(home)
    found = [(folder.name, read_crew_status(folder.path)) for folder in list_run_folders(state_dir)]
    crews = [(name, status) for name, status in found if status]
    if as_json:
        print_json([status.model_dump(mode="json") | {"name": name} for name, status in crews])
        return
    if not crews:
        raise StateError(
            "this machine is in no crew now: `barnraise join RUN --crew` starts one, and "
            "`barnraise crew join CODE` joins one"
        )
    for name, status in crews:
        _print_status(name, status)


def _print_status(name: str, status: CrewStatus) -> None:
    role = "leads" if status.number == 0 else "is a member of"
    out.print(
        f"[bold]{escape(name)}[/]: this machine {role} a crew of {len(status.seats)}; boundaries "
        f"in {status.boundary_bits} bits; {format_bytes(status.bytes_sent)} sent, "
        f"{format_bytes(status.bytes_received)} received; seen "
        f"{format_duration(max(0.0, time.time() - status.at))} ago",
        soft_wrap=True,
    )
    table = new_table("machine", "blocks", "state")
    for number, seat in enumerate(status.seats):
        ends = "ends, " if number == 0 else ""
        state = "this machine" if number == status.number else "connected"
        if not seat.connected:
            state = "not connected"
        last = seat.first_block + seat.blocks - 1
        table.add_row(escape(seat.name), f"{ends}{seat.first_block}\u2013{last}", state)
    out.print(table)
