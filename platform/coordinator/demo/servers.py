"""Run a mirror's embedded Postgres and Valkey: `python -m coordinator.demo.servers FOLDER`.

Usually a site's own processes start both, and the last of them stops them. If a mirror's processes
are killed one by one, the servers must not depend on any of them, so they belong to this process.
SIGHUP starts again what was killed.
"""

import json
import queue
import signal
import sys
from pathlib import Path

from coordinator.lib import embedded_servers

URLS = "servers.json"  # written once both answer: {"DATABASE_URL": …, "REDIS_URL": …}


def read_urls(folder: Path) -> dict[str, str] | None:
    """Return the servers' URLs; None before they answer."""
    try:
        return json.loads((folder / URLS).read_text())
    except FileNotFoundError:
        return None


def serve(folder: Path) -> None:
    """Run the servers until SIGTERM."""
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: signals.put(number))
    while True:
        database, valkey = embedded_servers.start(folder)
        unfinished = folder / f"{URLS}.new"
        unfinished.write_text(json.dumps({"DATABASE_URL": database, "REDIS_URL": valkey}))
        unfinished.replace(folder / URLS)
        if signals.get() != signal.SIGHUP:
            embedded_servers.stop(folder)
            return


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
