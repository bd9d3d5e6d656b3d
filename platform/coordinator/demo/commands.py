"""The command lines of a site's processes, with the options that docs/operate.md explains."""

import sys

WITHOUT_PARTS = ("--without-gossip", "--without-mingle", "--without-heartbeat")
BOUNDED_HEADERS = ("--http", "coordinator.lib.http_protocol:BoundedHttpProtocol")
CELERY = (sys.executable, "-m", "celery", "-A", "coordinator.celery:app")


def web_command(port: int, host: str = "127.0.0.1") -> tuple[str, ...]:
    """Return the command of a web server."""
    options = ("--no-access-log", "--no-proxy-headers", "--ws-max-size", "4096", *BOUNDED_HEADERS)
    application = ("-m", "uvicorn", "coordinator.asgi:application")
    return (sys.executable, *application, "--host", host, "--port", str(port), *options)


def worker_command(*queues: str) -> tuple[str, ...]:
    """Return the command of a worker that consumes these queues.

    It is solo, because tasks are short and a fork costs memory. One worker for both queues saves
    a process where nobody's webhooks are slow. The workers of a site need not know each other, and
    nobody listens to their events: each of these parts of Celery is one more that can fail when
    Valkey restarts.
    """
    options = ("-P", "solo", *WITHOUT_PARTS, "--loglevel", "WARNING")
    return (*CELERY, "worker", "-Q", ",".join(queues), *options)


def beat_command() -> tuple[str, ...]:
    """Return the command of the scheduler."""
    return (*CELERY, "beat", "--loglevel", "WARNING", "--pidfile=")
