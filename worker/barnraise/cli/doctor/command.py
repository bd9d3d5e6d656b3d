"""Run `barnraise doctor`: check what this machine needs to train, and name what to change."""

import contextlib
import dataclasses
import logging
from typing import Annotated

import typer
from rich.markup import escape

from barnraise import __version__
from barnraise.cli.addresses import RunAddress, run_argument
from barnraise.cli.console import errors, new_table, out, print_json
from barnraise.cli.doctor.findings import Level, MachineFacts, MachineFinding, judge_machine
from barnraise.cli.doctor.measurements import measure_machine_facts
from barnraise.cli.doctor.reach_verdict import judge_reach
from barnraise.cli.machine_options import (
    JsonOption,
    MachineOptions,
    measure_machine,
    open_state_dir,
)
from barnraise.cli.site_access import open_site
from barnraise.coordinator_client.failover import FailoverClient
from barnraise.durable_io import write_atomically
from barnraise.errors import BarnraiseError
from barnraise.peering.addresses.nat_type import judge_dial_backs
from barnraise.protocol.checkups import MAX_FINDINGS, Checkup, CheckupFinding
from barnraise.state_dir import StateDir

log = logging.getLogger("barnraise")

CHECKUP_FILE = "checkup.json"  # in the state directory: the last result
STYLES = {
    Level.OK: "green",
    Level.UNKNOWN: "dim",
    Level.WARNING: "yellow",
    Level.PROBLEM: "bold red",
}

OptionalRun = Annotated[
    RunAddress | None,
    run_argument(
        "A run whose machines report how they see this one; without it they are not asked."
    ),
]


def doctor(
    machine: MachineOptions,
    run: OptionalRun = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="UDP port that you join with; 0: any free one.")
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Check this machine: programs, memory, disk, clock, site, network, and which models fit.

    Each problem is named with its remedy; the exit code is 1 if there is one. The machine's page
    shows the last result.

    Example: barnraise doctor first-barn
    """
    state_dir = open_state_dir(machine.home)
    run_error = "" if run is None else _open_site(state_dir, run)
    hardware = None
    try:
        hardware = measure_machine(state_dir, machine)
    except (BarnraiseError, ImportError, OSError) as error:
        errors.print_sentence(f"[yellow]not measured: {escape(str(error))}[/]")
    facts = measure_machine_facts(state_dir, hardware)
    network = dataclasses.replace(facts.network, port=port)
    facts = dataclasses.replace(facts, network=network, run_error=run_error)
    if run is not None and not run_error:
        facts = _ask_peers(state_dir, run, facts)
    findings = judge_machine(facts)
    _publish(state_dir, build_checkup(facts, findings))
    if as_json:
        print_json(
            {
                "reach": judge_reach(facts.network).value,
                "dial_back": judge_dial_backs(facts.network.reach)[0].value,
                "up_bytes_per_second": round(facts.network.line.up),
                "down_bytes_per_second": round(facts.network.line.down),
                "findings": list(map(dataclasses.asdict, findings)),
            }
        )
    else:
        print_findings(findings)
    if any(finding.level is Level.PROBLEM for finding in findings):
        raise typer.Exit(1)


def _open_site(state_dir: StateDir, run: RunAddress) -> str:
    """Enrol at the run's site where that is needed; return why it failed, or an empty string."""
    try:
        open_site(state_dir, run)
    except BarnraiseError as error:
        return str(error)
    return ""


def _ask_peers(state_dir: StateDir, run: RunAddress, facts: MachineFacts) -> MachineFacts:
    """Return the facts with what other machines of the run see, or with why they were not asked.

    A site that does not answer or refuses, or a port that is taken, is one more finding: what was
    measured before may explain it.
    """
    # This imports torch, which takes seconds.
    from barnraise.cli.doctor.peer_meeting import meet_peers

    errors.print("Asking other machines of the run how they see this one …")
    try:
        network = dataclasses.replace(
            facts.network,
            has_asked_peers=True,
            has_port_mapping=state_dir.limits.port_mapping,
        )
        return dataclasses.replace(facts, network=meet_peers(state_dir, run.name, network))
    except BarnraiseError as error:
        return dataclasses.replace(facts, run_error=str(error))


def run_first_checkup(state_dir: StateDir) -> None:
    """Check this machine before its first join, and print what should be changed.

    Neither what it finds nor a failure of its own keeps the machine from joining.
    """
    if (state_dir.path / CHECKUP_FILE).exists():
        return
    try:
        facts = measure_machine_facts(state_dir, None)
        findings = judge_machine(facts)
        _publish(state_dir, build_checkup(facts, findings))
    except (BarnraiseError, OSError) as error:
        log.debug("this machine could not be checked: %s", error)
        return
    remarkable = [
        finding for finding in findings if finding.level in (Level.WARNING, Level.PROBLEM)
    ]
    if remarkable:
        errors.print("[bold]barnraise doctor[/] found on this machine:")
        print_findings(remarkable, to_errors=True)


def print_findings(findings: list[MachineFinding], to_errors: bool = False) -> None:
    """Print one line for each finding; long sentences wrap below themselves."""
    table = new_table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        style = STYLES[finding.level]
        table.add_row(f"[{style}]{finding.level}[/]", finding.subject, escape(finding.sentence))
    (errors if to_errors else out).print(table)


def build_checkup(facts: MachineFacts, findings: list[MachineFinding]) -> Checkup:
    """Return the result as the site receives it."""
    return Checkup(
        version=__version__,
        reach=judge_reach(facts.network).value,
        findings=[
            CheckupFinding(
                subject=finding.subject,
                level=finding.level.value,
                sentence="".join(c for c in finding.sentence if c.isprintable())[:600],
            )
            for finding in findings[:MAX_FINDINGS]
        ],
    )


def _publish(state_dir: StateDir, checkup: Checkup) -> None:
    """Save the result here, and send it to the site for the machine's page, where both work."""
    with contextlib.suppress(OSError):  # the findings say that nothing can be written
        write_atomically(state_dir.path / CHECKUP_FILE, checkup.model_dump_json(indent=1).encode())
    if not state_dir.is_enrolled:
        return
    try:
        with contextlib.closing(FailoverClient.from_state_dir(state_dir)) as coordinator:
            coordinator.submit_checkup(checkup)
    except BarnraiseError as error:  # an older site does not have this page
        log.debug("the result was not sent: %s", error)
