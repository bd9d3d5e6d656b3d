"""Run `barnraise remove`: delete what barnraise has on this computer, except the program itself."""

import contextlib
import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from barnraise.cli.console import new_table, out
from barnraise.cli.control import warn_of_own_texts
from barnraise.cli.installation import find_installation, join_command
from barnraise.cli.machine_options import HomeOption
from barnraise.cli.run_folders import RunFolder, count_disk_bytes, list_run_folders
from barnraise.cli.service.command import find_service, remove_service
from barnraise.cli.service.managers import ServiceManager
from barnraise.cli.update import CONSTRAINTS
from barnraise.coordinator_client.client import CoordinatorClient
from barnraise.errors import CoordinatorError
from barnraise.formats import format_bytes
from barnraise.state_dir import StateDir
from barnraise.training.local_control import refuse_other_worker

KEY_FILE = "key"
# What lies in a state directory. In a folder that a person has named, nothing else is ours.
OWN_NAMES = (
    *("runs", "logs", "exports", "push"),
    *("coordinator.json", "mirrors.json", "limits.json", "checkup.json", KEY_FILE),
    *("hardware.json", "hardware-cuda-*.json", "hardware.lock"),
    *("traffic.json", "service.xml", CONSTRAINTS),
)


def remove(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; revoke as well.")] = False,
    home: HomeOption = None,
) -> None:
    """Delete everything of barnraise on this computer: runs, logs, service and key.

    It asks first, and whether to revoke the machine on the site. What this machine has published
    stays in the shared models. The program itself stays; its uninstall line is printed.
    """
    folder = StateDir.choose_path(home)
    if not (folder / KEY_FILE).exists():
        out.print_sentence(f"There is nothing of barnraise in {escape(str(folder))}.")
        _print_uninstall_line()
        return
    state_dir = StateDir(folder)
    runs = list_run_folders(state_dir)
    refuse_other_worker(state_dir)
    service = find_service(state_dir)
    _print_contents(state_dir, runs, service)
    if not yes:
        typer.confirm("Delete all of it?", default=False, abort=True)
    if state_dir.is_enrolled:
        _revoke(state_dir, yes=yes)
    if service is not None:
        remove_service(state_dir)
    _delete_all(folder)
    _print_uninstall_line()


def _print_contents(
    state_dir: StateDir, runs: list[RunFolder], service: ServiceManager | None
) -> None:
    """List what is deleted, by size."""
    table = new_table(show_header=False)
    for run in runs:
        table.add_row("Run", escape(run.name), format_bytes(run.disk_bytes()))
    logs = state_dir.path / "logs"
    if logs.exists():
        table.add_row("Logs", escape(str(logs)), format_bytes(count_disk_bytes(logs)))
    if service is not None:
        table.add_row("Service", escape(service.place))
    table.add_row("Key", f"{state_dir.identity.key[:16]}…")
    if state_dir.is_enrolled:
        table.add_row("Site", escape(state_dir.membership.url))
    out.print(f"In {escape(str(state_dir.path))}:", soft_wrap=True)
    out.print(table)
    warn_of_own_texts(runs)


def _revoke(state_dir: StateDir, *, yes: bool) -> None:
    """Revoke the machine on its site, after asking; where that fails, name the page for it."""
    membership = state_dir.membership
    page = f"{membership.url}/machines/{membership.machine}/"
    question = f"Revoke this machine at {membership.url} too? Its key is never valid again."
    if not yes and not typer.confirm(question, default=True):
        out.print_sentence(f"It stays in your list there: {escape(page)}")
        return
    try:
        with contextlib.closing(CoordinatorClient.from_state_dir(state_dir)) as site:
            site.request_json("POST", "machines", membership.machine, "actions", "revoke")
    except CoordinatorError as error:
        if error.status in (401, 403):  # the site has revoked or forgotten it before
            return
        out.print_sentence(
            f"[yellow]It is not revoked:[/] {escape(str(error))}. Revoke it there: {escape(page)}"
        )
    else:
        out.print("The machine is revoked on the site.")


def _delete_all(folder: Path) -> None:
    """Delete what is ours in a state directory, the key last; an interrupted deletion goes on.

    Raises:
        OSError: a file cannot be deleted; its name is in the message.
    """
    is_all_ours = folder.name == StateDir.DEFAULT_NAME
    for path in sorted(folder.iterdir(), key=lambda path: path.name == KEY_FILE):
        final = path.with_name(path.name.removesuffix(".new"))  # of a write that a crash ended
        if not (is_all_ours or any(final.match(name) for name in OWN_NAMES)):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    foreign = sorted(path.name for path in folder.iterdir())
    if foreign:
        names = ", ".join(foreign[:5])
        out.print_sentence(
            f"Deleted. {escape(str(folder))} stays, with what is not barnraise's: {escape(names)}"
        )
        return
    folder.rmdir()
    out.print_sentence(f"Deleted {escape(str(folder))}.")


def _print_uninstall_line() -> None:
    line = join_command(find_installation().uninstall_command)
    if line:
        out.print(f"To uninstall the program:  [bold]{escape(line)}[/]", soft_wrap=True)
    else:
        out.print("The program is a clone of the sources: delete its folder.")
