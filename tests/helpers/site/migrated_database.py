"""Create databases that have the site's tables already, faster than by a migration each.

The first process that needs one migrates a database and dumps it below `build/`. Later ones load
the dump, as do later test sessions, until the site's code or its requirements change.
"""

import os
import re
from functools import cache
from hashlib import blake2b
from pathlib import Path

import psycopg
from filelock import FileLock
from helpers.paths import ROOT
from helpers.site.management import manage

BUILD = ROOT / "build"
MIGRATE_AND_DUMP = """
from django.core.management import call_command
from coordinator.lib.backup import run_tool
call_command("migrate", verbosity=0)
rows = ("--inserts", "--rows-per-insert=1000")
run_tool("pg_dump", "--no-owner", "--no-privileges", *rows, "--file={path}")
"""
TEMPLATE = "migrated"  # a database of this process's server, from which others are copied
META_COMMAND = re.compile(r"^\\.*\n", re.M)  # for psql alone


def database_url(name: str) -> str:
    """Return the address of a database of this process's server."""
    url = re.sub(r"/barnraise(?=\?|$)", f"/{name}", os.environ["DATABASE_URL"])
    assert url != os.environ["DATABASE_URL"]
    return url


def create_database(name: str) -> None:
    """Create a database with all tables in this process's server, which must run."""
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as server:
        query = "SELECT 1 FROM pg_database WHERE datname = %s"
        if not server.execute(query, (TEMPLATE,)).fetchone():
            server.execute(f"CREATE DATABASE {TEMPLATE}")
            create_tables(database_url(TEMPLATE))
        server.execute(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}")


def create_tables(url: str) -> None:
    """Create all tables, and the rows that a migration writes, in an empty database."""
    with psycopg.connect(url) as database:
        database.execute(read_dump())


@cache
def read_dump() -> str:
    """Return the commands that create the tables, after dumping them if no process has yet."""
    path = dump_path()
    BUILD.mkdir(exist_ok=True)
    with FileLock(BUILD / "migrated.lock"):
        if not path.exists():
            for outdated in BUILD.glob("migrated-*.sql"):
                outdated.unlink()
            unfinished = path.with_suffix(".new")
            write_dump(unfinished)
            unfinished.replace(path)
    return META_COMMAND.sub("", path.read_text())


def has_dump() -> bool:
    """Return whether a database of this code has been dumped."""
    return dump_path().exists()


def dump_path() -> Path:
    """Return where the dump of this code is or will be."""
    return BUILD / f"migrated-{code_digest()}.sql"


def code_digest() -> str:
    """Return a digest of all that decides what a migration does."""
    digest = blake2b(digest_size=8)
    for path in [ROOT / "requirements.txt", *sorted((ROOT / "platform").rglob("*.py"))]:
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def write_dump(path: Path) -> None:
    """Migrate a new database of this process's server, and dump it."""
    name = "migrating"
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as server:
        server.execute(f"CREATE DATABASE {name}")
        try:
            code = MIGRATE_AND_DUMP.format(path=str(path))
            manage({"DATABASE_URL": database_url(name)}, "shell", "-v", "0", "-c", code)
        finally:
            server.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
