"""Run every process of one site under one supervisor: servers, pages, tasks and their schedule."""

from collections.abc import Mapping
from pathlib import Path

from filelock import FileLock

from coordinator.demo.commands import beat_command, web_command, worker_command
from coordinator.demo.processes import ChildCommand
from coordinator.demo.servers import start_servers
from coordinator.demo.supervisor import Supervisor
from coordinator.lib.embedded import embedded_servers
from coordinator.lib.task_queues import TASK_QUEUE, WEBHOOK_QUEUE

WEB, WORKER, WEBHOOKS, BEAT = "site", "celery", "webhooks", "beat"  # names of the processes


class SupervisedSite:
    """The processes of one site.

    Args:
        state: The state folder. Servers that no variable names elsewhere keep their files there.
        logs: Folder with one log file for each process.
        port: Port of the web server.
        environment: Variables of all processes but the servers.

    Attributes:
        supervisor: Starts the processes again when they end.
        environment: The same variables, with the servers' addresses once these have started.
    """

    def __init__(
        self, state: Path, logs: Path, port: int, environment: Mapping[str, str] | None = None
    ) -> None:
        self.state = state
        self.port = port
        self.environment = dict(environment or {})
        self.supervisor = Supervisor(logs)
        self._lock: FileLock | None = None
        self._servers: list[str] = []

    def start_servers(self, *, durable: bool = True) -> None:
        """Take the state folder, start the servers, and wait until they answer.

        Raises:
            RuntimeError: Another process runs them, or one does not start.
        """
        self._lock = embedded_servers.claim(self.state)
        self.environment |= start_servers(self.supervisor, self.state, durable=durable)
        self._servers = self.supervisor.supervised_names()

    def start_web(self, host: str = "127.0.0.1") -> None:
        """Start the web server."""
        serve = web_command(self.port, host)
        self._supervise(WEB, (*serve, "--timeout-graceful-shutdown", "3"))

    def start_celery(self) -> None:
        """Start Celery's workers, one of them for webhooks alone, and its scheduler."""
        self.start_worker()
        self._supervise(WEBHOOKS, worker_command(WEBHOOK_QUEUE))
        self.start_beat()

    def start_worker(self) -> None:
        """Start the worker of all tasks but the webhooks."""
        self._supervise(WORKER, worker_command(TASK_QUEUE))

    def start_beat(self) -> None:
        """Start the scheduler."""
        self._supervise(BEAT, beat_command())

    def stop(self) -> None:
        """Stop everything, the servers last."""
        self.supervisor.stop()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _supervise(self, name: str, command: tuple[str, ...]) -> None:
        self.supervisor.supervise(
            name, ChildCommand(command, self.environment), self._find_full_disk
        )

    def _find_full_disk(self) -> str:
        """Return why no process can work now: the disk of a server that this site runs is full."""
        return embedded_servers.full_disk(self.state, *self._servers)
