"""Run this process's own site as the first of several mirrors: `make demo MIRRORS=3`."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from django.conf import settings

from coordinator.demo.mirrors import DemoMirror, build_mirror_list, common_state_hash
from coordinator.lib.free_ports import free_port
from coordinator.replication import mirror_list
from coordinator.replication.models import MirrorListVersion

SYNC_SECONDS = 30.0  # until all mirrors agree, after the last change

Wait = Callable[[Callable[[], object], str], None]  # waits for a condition with a description


class MirrorCluster:
    """Run several mirrors; the first uses this process's state folder, servers and database.

    Args:
        folder: Holds the other mirrors' folders and the root's key.
        count: Number of mirrors.
        port: First port.
    """

    def __init__(self, folder: Path, count: int, port: int) -> None:
        self.folder = folder
        self.all = [DemoMirror(settings.STATE_DIR, settings.MIRROR_NAME, free_port(port))]
        for number in range(2, count + 1):
            next_port = free_port(self.all[-1].port + 1)
            self.all.append(DemoMirror(folder / f"mirror-{number}", f"Mirror {number}", next_port))
        self.setup_seconds = 0.0  # until all mirrors were up
        self._gone: set[str] = set()

    @property
    def first(self) -> DemoMirror:
        """Return this process's own mirror."""
        return self.all[0]

    @property
    def others(self) -> list[DemoMirror]:
        """Return the other mirrors."""
        return self.all[1:]

    def start_setup(self) -> None:
        """Start the other mirrors' databases and tables; then they wait for this site."""
        self._began = time.monotonic()
        for mirror in self.others:
            mirror.start_servers()
        for mirror in self.others:
            mirror.start_setup("--join", self.first.url, "--list", str(self._list_path))

    def start(self, wait: Wait) -> None:
        """Start this site, then the others, each by its own `manage.py replication join`."""
        newest = mirror_list.newest_list()
        if (fresh := build_mirror_list(self.folder, self.all, newest)) is not None:
            mirror_list.publish(fresh, first=newest is None)
        self._list_path.write_text(
            MirrorListVersion.objects.latest("version").signed.model_dump_json()
        )
        self.first.start()
        for mirror in self.others:
            wait(mirror.is_set_up, f"{mirror.name}, which takes over what the first one knows")
            mirror.start()
        wait(lambda: all(mirror.fetch_status() for mirror in self.all), "every mirror")
        self.setup_seconds = time.monotonic() - self._began

    @property
    def _list_path(self) -> Path:
        return self.folder / "list.json"

    def failed_process(self) -> tuple[DemoMirror, str] | None:
        """Return a mirror with a failed process, and that process's name."""
        failures = ((mirror, mirror.processes.failed_process()) for mirror in self.all)
        return next(((mirror, name) for mirror, name in failures if name), None)

    def newly_dead(self) -> list[DemoMirror]:
        """Return mirrors that have lost a process since the last call."""
        dead = [mirror for mirror in self.all if not mirror.is_running]
        fresh = [mirror for mirror in dead if mirror.key not in self._gone]
        self._gone = {mirror.key for mirror in dead}
        return fresh

    @property
    def running(self) -> list[DemoMirror]:
        """Return the mirrors whose processes all run."""
        return [mirror for mirror in self.all if mirror.is_running]

    def wait_until_in_sync(self) -> str | None:
        """Wait until all running mirrors agree; return their state hash, None if they do not."""
        deadline = time.monotonic() + SYNC_SECONDS
        while not (state_hash := common_state_hash(self.running)) and time.monotonic() < deadline:
            time.sleep(0.3)
        return state_hash

    def summary(self) -> dict[str, Any]:
        """Return figures for the demo's last line."""
        return {
            "mirrors": len(self.all),
            "mirrors_live": len(self.running),
            "mirror_urls": [mirror.url for mirror in self.all],
            "one_state_hash": self.wait_until_in_sync() is not None,
            "mirrors_up_s": round(self.setup_seconds, 1),
        }

    def stop(self) -> None:
        """Stop all mirrors in parallel."""
        with ThreadPoolExecutor(len(self.all)) as crew:
            list(crew.map(lambda mirror: mirror.stop(), self.all))
