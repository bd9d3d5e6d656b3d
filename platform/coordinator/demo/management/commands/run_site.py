"""Run a whole site on this machine, and start again what ends: pages, tasks and their servers."""

import signal
import time
from types import FrameType
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError, CommandParser

from coordinator.demo.supervised_site import SupervisedSite
from coordinator.fleet.peer_addresses import MAX_PORT
from coordinator.lib.environment import read

LOOK_SECONDS = 0.5  # between two looks at whether the supervisor has given up


class Command(BaseCommand):
    """Run a whole site."""

    help = (
        "Run the web server, Celery and, where no variable names others, Postgres and Valkey. "
        "What ends is started again; Ctrl-C stops everything."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the options."""
        parser.add_argument("--port", type=int, default=8000)
        parser.add_argument("--host", default="127.0.0.1", help="address that the pages listen at")

    def handle(self, *, port: int, host: str, **options: Any) -> None:
        """Start everything, and run until a signal arrives or a process fails for good."""
        if not 0 < port <= MAX_PORT:
            raise CommandError(f"--port must be from 1 to {MAX_PORT:,}, not {port}")
        for name in ("SIGTERM", "SIGHUP"):  # a closed terminal stops everything too
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), _interrupt)
        environment = site_address(host, port)
        site = SupervisedSite(settings.STATE_DIR, settings.STATE_DIR / "logs", port, environment)
        try:
            site.start_servers()
            site.supervisor.count_restarts_in(settings.REDIS_URL)
            call_command("migrate", verbosity=0, interactive=False)
            site.start_web(host)
            site.start_celery()
            self.stdout.write(f"The site runs at http://{host}:{port}/. Ctrl-C stops it.")
            while not site.supervisor.failure:
                time.sleep(LOOK_SECONDS)
        except RuntimeError as error:
            raise CommandError(str(error)) from error
        except KeyboardInterrupt:
            self.stdout.write("Stopped: every process of the site has ended.")
        finally:
            site.stop()
        if site.supervisor.failure:
            raise CommandError(site.supervisor.failure)


def site_address(host: str, port: int) -> dict[str, str]:
    """Return the variable with the site's address for links in emails, unless one names it."""
    if read("BARNRAISE_URL", str, "") or read("BARNRAISE_ORIGINS", str, ""):
        return {}
    shown_host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    return {"BARNRAISE_URL": f"http://{shown_host}:{port}"}


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
