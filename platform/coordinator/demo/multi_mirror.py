"""This process's own site as the first of several mirrors: `make demo MIRRORS=3`."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from django.conf import settings

from coordinator.demo.mirrors import DemoMirror, build_mirror_list, common_state_hash
from coordinator.demo.processes import free_port
from coordinator.replication import mirror_list
from coordinator.replication.models import MirrorListVersion

SETTLING = 30.0  # seconds until all say the same, once nothing changes any more

Wait = Callable[[Callable[[], object], str], None]  # (until this, which is called so)


class MirrorCluster:
    """`folder` holds the other mirrors' folders and the root's key. The first has the state folder and the servers of
    this process, which speaks with its database."""

    def __init__(self, folder: Path, count: int, port: int):
        self.folder = folder
        self.all = [DemoMirror(settings.STATE_DIR, settings.MIRROR_NAME, free_port(port))]
        for number in range(2, count + 1):
            beside = free_port(self.all[-1].port + 1)
            self.all.append(DemoMirror(folder / f"mirror-{number}", f"Mirror {number}", beside))
        self.setup_seconds = 0.0  # seconds until all were up
        self._gone: set[str] = set()

    @property
    def first(self) -> DemoMirror:
        return self.all[0]

    @property
    def others(self) -> list[DemoMirror]:
        return self.all[1:]

    def start_setup(self) -> None:
        """The others come up while this site makes its tables: databases, tables, and then they wait for this one."""
        self._began = time.monotonic()
        for each in self.others:
            each.start_servers()
            each.start_setup("--join", self.first.url, "--list", str(self._list))

    def start(self, wait: Wait) -> None:
        """This site, whose tables are there; then the others, each by its own `mirror join`."""
        held = mirror_list.newest_list()
        if (fresh := build_mirror_list(self.folder, self.all, held)) is not None:
            mirror_list.publish(fresh, first=held is None)
        self._list.write_text(MirrorListVersion.objects.latest("version").signed.model_dump_json())
        self.first.start()
        for each in self.others:
            wait(each.is_set_up, f"{each.name}, which takes over what the first one knows")
            each.start()
        wait(lambda: all(each.fetch_status() for each in self.all), "every mirror")
        self.setup_seconds = time.monotonic() - self._began

    @property
    def _list(self) -> Path:
        return self.folder / "list.json"

    def failed_process(self) -> tuple[DemoMirror, str] | None:
        """A mirror that did not come up, and which of its processes it was."""
        found = ((each, each.processes.failed_process()) for each in self.all)
        return next(((each, name) for each, name in found if name), None)

    def newly_dead(self) -> list[DemoMirror]:
        """Those that are found dead now, and were not before: somebody killed a part of them."""
        fresh = [each for each in self.all if not each.is_running and each.key not in self._gone]
        self._gone |= {each.key for each in fresh}
        return fresh

    @property
    def running(self) -> list[DemoMirror]:
        return [each for each in self.all if each.is_running]

    def wait_until_in_sync(self) -> str | None:
        """The one state hash of all that live, once they agree; None where they do not in time."""
        deadline = time.monotonic() + SETTLING
        while not (found := common_state_hash(self.running)) and time.monotonic() < deadline:
            time.sleep(0.3)
        return found

    def summary(self) -> dict[str, Any]:
        """For the demo's last line."""
        return {
            "mirrors": len(self.all),
            "mirrors_live": len(self.running),
            "mirror_urls": [each.url for each in self.all],
            "one_state_hash": self.wait_until_in_sync() is not None,
            "mirrors_up_s": round(self.setup_seconds, 1),
        }

    def stop(self) -> None:
        """All of them, side by side."""
        with ThreadPoolExecutor(len(self.all)) as crew:
            list(crew.map(lambda each: each.stop(), self.all))
