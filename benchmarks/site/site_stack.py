"""Run a site as docs/operate.md deploys it, on servers of its own, and measure what it uses."""

import os
import secrets
import shutil
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
        hosts: Number of web servers, each with a state folder of its own, among which the processes
            are dealt.
    """

    def __init__(
        self, folder: Path, web_processes: int, children: ChildProcesses, hosts: int = 1
    ) -> None:
        self.folder = folder
        self.children = children
        self.processes_of_host = max(1, web_processes // hosts)
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
        self.ports: list[int] = []
        for _ in range(hosts):
            self.ports.append(free_port(self.ports[-1] + 1 if self.ports else 8700))
        self.url = f"http://127.0.0.1:{self.ports[0]}"

    def start(self) -> None:
        """Start the web server, Celery's workers and beat; return when the site is ready."""
        from coordinator.demo.commands import beat_command, worker_command
        from coordinator.lib.task_queues import TASK_QUEUE, WEBHOOK_QUEUE

        nice = ("nice", "-n", "10")
        for number, port in enumerate(self.ports):
            state = self.folder
            if number:  # a further host has copies of the first one's keys, as docs/operate.md says
                state = self.folder / f"host-{number + 1}"
                state.mkdir()
                shutil.copy(self.folder / "mirror.key", state)
            options = ("--port", str(port), "--workers", str(self.processes_of_host))
            name = f"web-{number + 1}" if number else "web"
            command = (sys.executable, *WEB_COMMAND, *options)
            self.processes.start(name, *command, BARNRAISE_STATE=str(state))
        self.processes.start("celery", *nice, *worker_command(TASK_QUEUE))
        self.processes.start("webhooks", *nice, *worker_command(WEBHOOK_QUEUE))
        self.processes.start("beat", *nice, *beat_command())
        self.children.wait_until(self._is_ready, "the site's readiness", START_SECONDS)

    def _is_ready(self) -> bool:
        try:
            addresses = [f"http://127.0.0.1:{port}/readyz" for port in self.ports]
            return all(httpx.get(url, timeout=10).status_code == 200 for url in addresses)
        except httpx.HTTPError:
            return False

    def port_of(self, number: int) -> int:
        """Return the port at which the worker or watcher of this number finds the site."""
        return self.ports[number % len(self.ports)]

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
