"""A site as docs/operate.md deploys it, on servers of its own in a folder of its own; what its processes use."""

import os
import secrets
import sys
import time
from pathlib import Path

import httpx
import psutil

WEB = ("-m", "uvicorn", "coordinator.asgi:application", "--host", "127.0.0.1", "--no-access-log",
       "--ws-per-message-deflate", "false", "--timeout-worker-healthcheck", "60")  # fmt: skip
STARTING = 180.0  # seconds until it must be ready
CELERY = ("-m", "celery", "-A", "coordinator.celery:app")


class Site:
    """Make it before Django's settings are read: they take the servers' addresses from the environment."""

    def __init__(self, folder: Path, web: int):
        """`web`: processes that serve pages, API and websockets."""
        self.folder, self.web = folder, web
        folder.chmod(0o755)  # where root runs it, Postgres has a user of its own
        os.environ |= {
            "BARNRAISE_STATE": str(folder), "DJANGO_SETTINGS_MODULE": "coordinator.settings",
            "SECRET_KEY": secrets.token_urlsafe(48), "BARNRAISE_LOG": "WARNING",
        }  # fmt: skip
        for name in ("DATABASE_URL", "REDIS_URL"):
            os.environ.pop(name, None)
        from coordinator.lib import embedded_servers

        os.environ["DATABASE_URL"], os.environ["REDIS_URL"] = embedded_servers.start(folder)
        import django

        django.setup()
        from django.core.management import call_command

        from coordinator.demo.processes import ProcessGroup, free_port

        call_command("migrate", verbosity=0, interactive=False)
        self.family = ProcessGroup(folder / "logs")
        self.port = free_port(8700)
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        celery = ("nice", "-n", "10", sys.executable, *CELERY)
        self.family.start(
            "web", sys.executable, *WEB, "--port", str(self.port), "--workers", str(self.web)
        )
        self.family.start("celery", *celery, "worker", "-P", "solo", "--loglevel", "WARNING")
        self.family.start("beat", *celery, "beat", "--loglevel", "WARNING", "--pidfile=")
        deadline = time.monotonic() + STARTING
        while not self._answers():
            assert time.monotonic() < deadline, self.family.log_tail("web")
            time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=10).status_code == 200
        except httpx.HTTPError:
            return False

    def stop(self) -> None:
        from coordinator.lib import embedded_servers

        self.family.stop()
        embedded_servers.stop(self.folder, force=True)

    def processes(self) -> dict[str, list[psutil.Process]]:
        """Those of each part, the load's own included."""
        parts = {
            name: [own := psutil.Process(child.pid), *own.children(recursive=True)]
            for name, child in self.family.children.items()
        }
        for name, folder in (("postgres", "postgres"), ("valkey", "valkey")):
            parts[name] = [p for p in psutil.process_iter() if _works_in(p, self.folder / folder)]
        return parts | {"load": [psutil.Process()]}

    def used(self) -> dict[str, tuple[float, float]]:
        """Part → (CPU seconds so far, bytes that it alone holds)."""
        return {name: _sums(found) for name, found in self.processes().items()}


def _sums(found: list[psutil.Process]) -> tuple[float, float]:
    seconds = size = 0.0
    for process in found:
        try:
            times = process.cpu_times()
            seconds += (
                times.user + times.system + times.children_user + times.children_system
            )  # of ended ones too
            size += process.memory_full_info().uss
        except psutil.NoSuchProcess:  # a Postgres backend whose connection was closed meanwhile
            continue
    return seconds, size


def _works_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.cwd() == str(folder)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
