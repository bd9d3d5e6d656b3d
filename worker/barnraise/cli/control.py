"""Run `barnraise pause`, `resume`, `stop` and `leave`: control this machine's workers, locally.

No site and no token is needed: the commands reach a worker through files in its run's folder.
"""

import contextlib
import shutil
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from barnraise.cli.addresses import RunAddress, RunArgument, run_argument
from barnraise.cli.console import errors, out
from barnraise.cli.machine_options import HomeOption, open_state_dir
from barnraise.cli.run_folders import RunFolder, list_run_folders, select_run_folders
from barnraise.errors import StateError
from barnraise.formats import format_bytes
from barnraise.planning.pause_times import find_pause_end
from barnraise.protocol.polling import PERSON_POLL_SECONDS
from barnraise.training.limits.decision import format_until
from barnraise.training.limits.rule_watch import local_now
from barnraise.training.local_control import LocalPause

LocalRunArgument = Annotated[
    RunAddress | None, run_argument("One run (default: all of this machine).")
]


def pause(
    run: LocalRunArgument = None,
    duration: Annotated[
        str, typer.Option("--for", help="How long, like 1h or 90m; it then resumes by itself.")
    ] = "",
    until: Annotated[str, typer.Option(help="Until when, in local time, like 07:00.")] = "",
    offline: Annotated[
        bool, typer.Option("--offline", help="Leave the other machines meanwhile.")
    ] = False,
    home: HomeOption = None,
) -> None:
    """Pause this machine's training until `barnraise resume`, also after a restart.

    It stays connected and receives the others' updates. A pause of more than a minute gives the
    memory of the model back.

    Example: barnraise pause --until 07:00
    """
    now = local_now()
    end = find_pause_end(duration.strip(), until.strip(), now)
    for folder in _select(home, run):
        folder.control.pause(LocalPause(until=end, is_offline=offline))
        suffix = "after its current step" if folder.is_running else "from its next start on"
        if end is not None:
            suffix += f", until {format_until(end, now)}"
        out.print_sentence(f"[bold]{escape(folder.name)}[/] pauses {suffix}.")


def resume(run: LocalRunArgument = None, home: HomeOption = None) -> None:
    """Resume paused training on this machine."""
    for folder in _select(home, run):
        folder.control.resume()
        hint = "" if folder.is_running else f" once it runs: barnraise join {folder.slug}"
        out.print_sentence(f"[bold]{escape(folder.name)}[/] resumes{escape(hint)}.")


def stop(run: LocalRunArgument = None, home: HomeOption = None) -> None:
    """Stop this machine's workers as Ctrl-C does: each saves its work and leaves."""
    running = [folder for folder in _select(home, run) if folder.is_running]
    if not running:
        out.print("No worker is running on this machine.")
        return
    for folder in running:
        stop_worker(folder)


def leave(
    run: RunArgument,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete the run's files on this machine, too.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before deleting.")] = False,
    home: HomeOption = None,
) -> None:
    """Stop working on a run; with --delete, free the disk space that it takes here.

    What this machine has published stays in the shared model.
    """
    (folder,) = _select(home, run)
    size = format_bytes(folder.disk_bytes())
    if delete and not yes:
        out.print_sentence(
            f"This deletes {size}: this machine's copy of the model, its optimizer state and the "
            "text. What it has published stays in the shared model."
        )
        warn_of_own_texts([folder])
        typer.confirm("Delete it?", default=False, abort=True)
    if folder.is_running:
        stop_worker(folder)
    folder.control.resume()
    if delete:
        _delete_folder(folder.path)
        out.print(f"Left [bold]{escape(folder.name)}[/]; {size} are free again.")
    else:
        out.print_sentence(
            f"Left [bold]{escape(folder.name)}[/]. Its files take {size}; "
            f"`barnraise leave {folder.slug} --delete` frees them, and "
            f"`barnraise join {folder.slug}` returns."
        )


def warn_of_own_texts(folders: list[RunFolder]) -> None:
    """Print what deleting these folders means for the runs whose text was prepared here."""
    for folder in folders:
        if folder.is_owned:
            out.print_sentence(
                f"[yellow]This machine prepared the text of {escape(folder.name)}:[/] unless "
                "others have it, nobody can join the run afterwards."
            )


def stop_worker(folder: RunFolder) -> None:
    """Let a run's worker save its work and stop, and wait until it has.

    Raises:
        typer.Exit: Ctrl-C ended the wait; the worker stops all the same.
    """
    process = folder.control.find_worker()
    if process is None:
        return
    folder.control.request_stop(process)
    errors.print_sentence(f"[bold]{escape(folder.name)}[/] saves its work …")
    try:
        while folder.is_locked and process.is_running:
            time.sleep(PERSON_POLL_SECONDS)
    except KeyboardInterrupt:
        errors.print("Not waiting: it stops by itself.")
        raise typer.Exit(1) from None
    out.print_sentence(f"[bold]{escape(folder.name)}[/] has stopped.")


def _select(home: Path | None, run: RunAddress | None) -> list[RunFolder]:
    """Return the folders of a run, or of all runs of this machine.

    Raises:
        StateError: there is none.
    """
    folders = list_run_folders(open_state_dir(home))
    if run is not None:
        return select_run_folders(folders, run.name)
    if not folders:
        raise StateError("this machine has not worked on any run yet: barnraise join RUN")
    return folders


def _delete_folder(path: Path) -> None:
    """Delete a run's folder; nothing recognises the rest of an interrupted deletion as a run.

    Raises:
        OSError: a file cannot be deleted; its name is in the message.
    """
    doomed = path.with_name(f".deleted-{path.name}")
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(doomed)
    path.rename(doomed)
    shutil.rmtree(doomed)
