"""`python -m coordinator.demo.servers FOLDER`: a mirror's embedded Postgres and Valkey, while this process lives.

A site's own processes start both by themselves, and the last of them stops them. Of a mirror that is killed a part at a
time the servers must be nobody's who dies: they are this process's. SIGHUP starts again what was killed.
"""

import json
import queue
import signal
import sys
from pathlib import Path

from coordinator.lib import embedded_servers

URLS = "servers.json"  # in the folder, once both answer: {"DATABASE_URL": …, "REDIS_URL": …}


def read_urls(folder: Path) -> dict[str, str] | None:
    """Where they answer; None before they do."""
    try:
        return json.loads((folder / URLS).read_text())
    except FileNotFoundError:
        return None


def serve(folder: Path) -> None:
    """Until SIGTERM."""
    asked: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: asked.put(number))
    while True:
        database, valkey = embedded_servers.start(folder)
        fresh = folder / f"{URLS}.new"
        fresh.write_text(json.dumps({"DATABASE_URL": database, "REDIS_URL": valkey}))
        fresh.replace(folder / URLS)
        if asked.get() != signal.SIGHUP:
            embedded_servers.stop(folder)
            return


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
