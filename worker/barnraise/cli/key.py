"""Run `barnraise key …`: move this machine's key to another computer, or keep it safe."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from barnraise.cli.console import out
from barnraise.cli.help_format import HelpfulTyper
from barnraise.cli.key_backup import (
    MAX_FILE_BYTES,
    KeyBackup,
    check_backup,
    decrypt_backup,
    encrypt_backup,
)
from barnraise.cli.machine_options import HomeOption
from barnraise.durable_io import write_atomically
from barnraise.errors import StateError
from barnraise.state_dir import StateDir
from barnraise.training.local_control import refuse_other_worker

key = HelpfulTyper(no_args_is_help=True, help="Back up this machine's key, or move it.")

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The encrypted key.")]


@key.command("export")
def export_key(file: FileArgument, home: HomeOption = None) -> None:
    """Save this machine's key and its enrolment in a file, encrypted by a passphrase.

    Example: barnraise key export barnraise.key
    """
    folder = StateDir.choose_path(home)
    if not (folder / "key").exists():
        raise StateError(f"there is no key in {folder}: `barnraise login URL` creates one")
    state_dir = StateDir(folder)
    if file.exists():
        raise StateError(f"{file} exists already, and is not overwritten: name another file")
    passphrase = typer.prompt("Passphrase", hide_input=True, confirmation_prompt="Once more")
    membership = state_dir.membership if state_dir.is_enrolled else None
    backup = KeyBackup(secret=state_dir.identity.secret.hex(), membership=membership)
    write_atomically(file, encrypt_backup(backup, passphrase), private=True)
    out.print_sentence(
        f"Saved the key {state_dir.identity.key[:16]}… in {escape(str(file))}. Without the "
        "passphrase nobody can read it, and nobody can restore it.\n"
        "Never train with it on two computers at a time: each machine needs a key of its own."
    )


@key.command("import")
def import_key(file: FileArgument, home: HomeOption = None) -> None:
    """Make this computer the machine whose key a file holds.

    Example: barnraise key import barnraise.key
    """
    folder = StateDir.choose_path(home)
    if (folder / "key").exists():
        state_dir = StateDir(folder)
        refuse_other_worker(state_dir)
        raise StateError(
            f"{folder} has a key already ({state_dir.identity.key[:16]}…), which is not "
            "overwritten: import into another folder with --home FOLDER, or remove this machine "
            "with `barnraise remove` first"
        )
    if not file.exists():
        raise StateError(f"there is no file {file}")
    with file.open("rb") as opened:
        content = opened.read(MAX_FILE_BYTES + 1)
    check_backup(content)
    backup = decrypt_backup(content, typer.prompt("Passphrase", hide_input=True))
    write_atomically(folder / "key", bytes.fromhex(backup.secret), private=True)
    state_dir = StateDir(folder)
    enrolled_at = ""
    if backup.membership is not None:
        state_dir.save_membership(backup.membership)
        enrolled_at = f", enrolled at {backup.membership.url}"
    out.print_sentence(
        f"This is the machine {state_dir.identity.key[:16]}… now{escape(enrolled_at)}.\n"
        "Remove the key from the other computer: with two, the newer worker stops."
    )
