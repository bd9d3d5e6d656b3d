"""Run a site as docs/operate.md deploys it, on servers of its own, and measure what it uses."""

import os
import secrets
import sys
from pathlib import Path

import httpx
import psutil
from child_processes import ChildProcesses, list_statuses

WEB_COMMAND = (
    "-m",
    "uvicorn",
    "coordinator.asgi:application",
    "--host",
    "127.0.0.1",
    "--no-access-log",
    "--no-proxy-headers",
    "--http",
    "coordinator.lib.http_protocol:BoundedHttpProtocol",
    "--ws-per-message-deflate",
    "false",
    "--timeout-worker-healthcheck",
    "60",
)
START_SECONDS = 180.0  # until the site must be ready


class Site:
    """Run the processes of one site.

    Create it before Django's settings are read: they take the servers' addresses from the
    environment.

    Args:
        folder: State folder of the site.
        web_processes: Number of processes that serve pages, the API and websockets.
        children: Watches and ends all processes.
    """

    def __init__(self, folder: Path, web_processes: int, children: ChildProcesses) -> None:
        self.folder = folder
        self.children = children
        self.web_processes = web_processes
        folder.chmod(0o755)  # if root runs the benchmark, Postgres runs as another user
        os.environ |= {
            "BARNRAISE_STATE": str(folder),
            "DJANGO_SETTINGS_MODULE": "coordinator.settings",
            "SECRET_KEY": secrets.token_urlsafe(48),
            "BARNRAISE_LOG": "WARNING",
        }
        for name in ("DATABASE_URL", "REDIS_URL"):
            os.environ.pop(name, None)
        from coordinator.lib.embedded import embedded_servers

        os.environ["DATABASE_URL"], os.environ["REDIS_URL"] = embedded_servers.start(folder)
        import django

        django.setup()
        from django.core.management import call_command

        from coordinator.demo.processes import ProcessGroup
        from coordinator.lib.free_ports import free_port

        call_command("migrate", verbosity=0, interactive=False)
        self.processes = ProcessGroup(folder / "logs")
        children.watch(lambda: list_statuses(self.processes.children, self.processes.logs))
        self.port = free_port(8700)
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the web server, Celery's workers and beat; return when the site is ready."""
        from coordinator.demo.commands import beat_command, worker_command
        from coordinator.lib.task_queues import TASK_QUEUE, WEBHOOK_QUEUE

        nice = ("nice", "-n", "10")
        web = (*WEB_COMMAND, "--port", str(self.port), "--workers", str(self.web_processes))
        self.processes.start("web", sys.executable, *web)
        self.processes.start("celery", *nice, *worker_command(TASK_QUEUE))
        self.processes.start("webhooks", *nice, *worker_command(WEBHOOK_QUEUE))
        self.processes.start("beat", *nice, *beat_command())
        self.children.wait_until(self._is_ready, "the site's readiness", START_SECONDS)

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=10).status_code == 200
        except httpx.HTTPError:
            return False

    def stop(self) -> None:
        """Stop the processes and the servers."""
        from coordinator.lib.embedded import embedded_servers

        self.processes.stop()
        embedded_servers.stop(self.folder, force=True)

    def processes_by_part(self) -> dict[str, list[psutil.Process]]:
        """Return the processes of each part of the site, and this one as "load"."""
        parts: dict[str, list[psutil.Process]] = {}
        for name, child in self.processes.children.items():
            process = psutil.Process(child.pid)
            parts[name] = [process, *process.children(recursive=True)]
        for name in ("postgres", "valkey"):
            parts[name] = [p for p in psutil.process_iter() if _works_in(p, self.folder / name)]
        return parts | {"load": [psutil.Process()]}

    def resource_usage(self) -> dict[str, tuple[float, float]]:
        """Return for each part the CPU seconds so far and the bytes that it alone holds (USS)."""
        return {name: _sum_usage(parts) for name, parts in self.processes_by_part().items()}


def _sum_usage(processes: list[psutil.Process]) -> tuple[float, float]:
    seconds = 0.0
    size = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
            # Children that have ended count too.
            seconds += times.user + times.system + times.children_user + times.children_system
            size += process.memory_full_info().uss
        except psutil.NoSuchProcess:  # a Postgres backend whose connection was closed meanwhile
            continue
    return seconds, size


def _works_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.cwd() == str(folder)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
