"""This process's own site as the first of several mirrors: `make demo MIRRORS=3`."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from django.conf import settings

from coordinator.demo.mirrors import Mirror, listing, one_state
from coordinator.demo.processes import free_port
from coordinator.replication import mirror_list
from coordinator.replication.models import MirrorListVersion

SETTLING = 30.0  # seconds until all say the same, once nothing changes any more

Wait = Callable[[Callable[[], object], str], None]  # (until this, which is called so)


class Several:
    """`folder` holds the other mirrors' folders and the root's key. The first has the state folder and the servers of
    this process, which speaks with its database."""

    def __init__(self, folder: Path, count: int, port: int):
        self.folder = folder
        self.all = [Mirror(settings.STATE_DIR, settings.MIRROR_NAME, free_port(port))]
        for number in range(2, count + 1):
            beside = free_port(self.all[-1].port + 1)
            self.all.append(Mirror(folder / f"mirror-{number}", f"Mirror {number}", beside))
        self.took = 0.0  # seconds until all were up
        self._gone: set[str] = set()

    @property
    def first(self) -> Mirror:
        return self.all[0]

    @property
    def others(self) -> list[Mirror]:
        return self.all[1:]

    def begin(self) -> None:
        """The others come up while this site makes its tables: databases, tables, and then they wait for this one."""
        self._began = time.monotonic()
        for each in self.others:
            each.start_servers()
            each.raise_by("--join", self.first.url, "--list", str(self._list))

    def start(self, wait: Wait) -> None:
        """This site, whose tables are there; then the others, each by its own `mirror join`."""
        held = mirror_list.newest_list()
        if (fresh := listing(self.folder, self.all, held)) is not None:
            mirror_list.publish(fresh, first=held is None)
        self._list.write_text(MirrorListVersion.objects.latest("version").signed.model_dump_json())
        self.first.start()
        for each in self.others:
            wait(each.raised, f"{each.name}, which takes over what the first one knows")
            each.start()
        wait(lambda: all(each.status() for each in self.all), "every mirror")
        self.took = time.monotonic() - self._began

    @property
    def _list(self) -> Path:
        return self.folder / "list.json"

    def died(self) -> tuple[Mirror, str] | None:
        """A mirror that did not come up, and which of its processes it was."""
        found = ((each, each.family.died()) for each in self.all)
        return next(((each, name) for each, name in found if name), None)

    def lost(self) -> list[Mirror]:
        """Those that are found dead now, and were not before: somebody killed a part of them."""
        fresh = [each for each in self.all if not each.lives and each.key not in self._gone]
        self._gone |= {each.key for each in fresh}
        return fresh

    @property
    def live(self) -> list[Mirror]:
        return [each for each in self.all if each.lives]

    def settled(self) -> str | None:
        """The one state hash of all that live, once they agree; None where they do not in time."""
        deadline = time.monotonic() + SETTLING
        while not (found := one_state(self.live)) and time.monotonic() < deadline:
            time.sleep(0.3)
        return found

    def told(self) -> dict[str, Any]:
        """For the demo's last line."""
        return {
            "mirrors": len(self.all),
            "mirrors_live": len(self.live),
            "mirror_urls": [each.url for each in self.all],
            "one_state_hash": self.settled() is not None,
            "mirrors_up_s": round(self.took, 1),
        }

    def stop(self) -> None:
        """All of them, side by side."""
        with ThreadPoolExecutor(len(self.all)) as crew:
            list(crew.map(lambda each: each.stop(), self.all))
