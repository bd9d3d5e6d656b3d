"""Measure what mirrors cost each other: `make bench-mirrors`, docs/benchmarks/mirrors.md.

    bootstrap   a new mirror receives everything from another: `manage.py replication join`
    lag         50 changes a second, half of them at each of two mirrors, for a minute: from each
                commit until the other mirror has folded the event and written its rows
    growth      what a worker's day adds to the log

Two mirrors run, each with its own Postgres, Valkey, web server and Celery, connected only by HTTP.
The script prints a line for each part, and one JSON object as its last line. `--quick`: a tenth of
everything. Run nothing else on the machine meanwhile.
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import psycopg

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))

from child_processes import ChildProcesses
from mirror_site import Site

from coordinator.demo.mirrors import build_mirror_list
from coordinator.lib.free_ports import free_port

HERE = Path(__file__).resolve().parent
MODULE_FOLDERS = [str(HERE), str(HERE.parent / "site")]  # of seed_data and what it imports
POLL_SECONDS = 0.05  # between two measurements of how far the other mirror has come
LAST_APPLIED_QUERY = """
    SELECT seq FROM eventlog_logevent WHERE origin_id = %s AND NOT EXISTS (
        SELECT FROM eventlog_aggregate WHERE name = aggregate AND (stale OR NOT projected))
    ORDER BY seq DESC LIMIT 1
"""
MAX_LAG_SECONDS = 30.0  # after the last change; a change that takes longer counts with this
SETTLE_SECONDS = 15.0  # until both mirrors have pulled and are idle


def run_task(site: Site, name: str, *arguments: float) -> dict[str, Any]:
    """Run a task of `seed_data.py` inside a mirror and return its result."""
    call = ", ".join(map(repr, (name, *arguments)))
    code = f"import sys; sys.path += {MODULE_FOLDERS}; import seed_data; seed_data.run_task({call})"
    return json.loads(site.manage("shell", "-v", "0", "-c", code).strip().splitlines()[-1])


def measure_bootstrap(
    bench: ChildProcesses, first: Site, second: Site, digest: str
) -> dict[str, float]:
    """Let the second mirror, whose tables are empty, join the first one."""
    start = time.monotonic()
    second.manage("replication", "join", first.url, "--list", digest)
    seconds = time.monotonic() - start
    second.start_web()
    bench.wait_until(second.answers, "the second mirror", 60)
    first.manage("replication", "pull")  # fetches the log that the second one has begun
    expected = run_task(first, "state")
    state = run_task(second, "state")
    if expected["state"] != state["state"] or state["waiting"]:
        raise SystemExit(f"the new mirror has the state {state}, and the first one {expected}")
    return {"events": expected["events"], "bootstrap_s": round(seconds, 1)}


class ProgressWatcher(threading.Thread):
    """Record how far a mirror's database has applied another mirror's log, until `stop`.

    Attributes:
        seen: (seconds since 1970, number of the last applied event) of each measurement.
    """

    def __init__(self, origin: str, site: Site) -> None:
        super().__init__(daemon=True)
        self.seen: list[tuple[float, int]] = []
        self._origin = origin
        self._url = site.environment["DATABASE_URL"]
        self._stopped = threading.Event()

    def run(self) -> None:
        """Measure until `stop`."""
        with psycopg.connect(self._url, autocommit=True) as connection:
            while not self._stopped.wait(POLL_SECONDS):
                row = connection.execute(LAST_APPLIED_QUERY, [self._origin]).fetchone()
                self.seen.append((time.time(), row[0] if row else 0))

    def has_seen(self, number: int) -> bool:
        """Return whether the event with this number was applied."""
        return bool(self.seen) and self.seen[-1][1] >= number

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self.join()


def measure_lag(sites: list[Site], interval: float, seconds: float) -> dict[str, float]:
    """Make changes at both mirrors and measure when the other one's database has applied them.

    Args:
        sites: Two mirrors.
        interval: Seconds between two changes at either mirror.
        seconds: Duration.
    """
    for site in sites:
        site.start_celery()
    time.sleep(SETTLE_SECONDS)
    watchers = [
        ProgressWatcher(run_task(site, "state")["origin"], other)
        for site, other in zip(sites, sites[::-1], strict=True)
    ]
    for watcher in watchers:
        watcher.start()
    with ThreadPoolExecutor(len(sites)) as pool:
        tasks = [
            pool.submit(run_task, site, "change", interval * len(sites), seconds, n)
            for n, site in enumerate(sites)
        ]
        results = [task.result() for task in tasks]
    deadline = time.monotonic() + MAX_LAG_SECONDS
    lags: list[float] = []
    for watcher, result in zip(watchers, results, strict=True):
        while not watcher.has_seen(result["changes"][-1][0]) and time.monotonic() < deadline:
            time.sleep(0.1)
        watcher.stop()
        lags += change_lags(result["changes"], watcher.seen)
    lags.sort()
    return {
        "changes_per_s": round(sum(result["rate"] for result in results), 1),
        "replication_lag_p50_s": round(median(lags), 2),
        "replication_lag_p95_s": round(lags[int(0.95 * (len(lags) - 1))], 2),
        "replication_lag_max_s": round(lags[-1], 2),
    }


def change_lags(changes: list[tuple[int, float]], seen: list[tuple[float, int]]) -> list[float]:
    """Return the seconds from each change's commit until it was seen. Pure.

    Args:
        changes: (event number, commit in seconds since 1970), ascending.
        seen: As `ProgressWatcher.seen`.

    Returns:
        The lags; `MAX_LAG_SECONDS` for a change that was not seen.
    """
    lags = []
    position = 0
    for number, committed in changes:
        while position < len(seen) and seen[position][1] < number:
            position += 1
        was_seen = position < len(seen)
        lags.append(seen[position][0] - committed if was_seen else MAX_LAG_SECONDS)
    return lags


def start_mirrors(
    folder: Path, bench: ChildProcesses, cleanup: ExitStack
) -> tuple[list[Site], str]:
    """Start the first mirror, and the second one's servers with empty tables.

    Returns:
        Both mirrors, and the digest of their mirror list.
    """
    names = ("North", "East")
    sites = [
        Site(folder / name.lower(), name, free_port(8800 + 10 * n)) for n, name in enumerate(names)
    ]
    first = sites[0]
    signed = build_mirror_list(folder, sites)
    assert signed is not None
    list_file = folder / "list.json"
    list_file.write_text(signed.model_dump_json())
    for site in sites:
        cleanup.callback(site.stop)
        bench.watch(site.child_statuses)
        site.start_servers()
    for site in sites:
        bench.wait_until(site.find_servers, f"{site.name}'s servers", 120)
        site.manage("migrate", "-v", "0")
    first.manage("mirror_list", "publish", str(list_file), "--first")
    first.start_web()
    bench.wait_until(first.answers, "the first mirror", 60)
    return sites, signed.digest


def measure(
    folder: Path, events: int, seconds: float, interval: float, cleanup: ExitStack
) -> dict[str, Any]:
    """Measure all three parts and return their figures."""
    bench = ChildProcesses(folder, cleanup)
    sites, list_digest = start_mirrors(folder, bench, cleanup)
    first, second = sites
    filled = run_task(first, "fill", events)
    took = f"{filled['seconds']:.0f} s"
    print(f"  {filled['events']:,} events in the first log, folded there in {took}", flush=True)

    figures: dict[str, Any] = measure_bootstrap(bench, first, second, list_digest)
    print(f"  the second mirror received them in {figures['bootstrap_s']} s", flush=True)

    figures |= run_task(first, "growth")
    print(f"  a worker's day: {figures['log_bytes_per_worker_day']:,} bytes", flush=True)

    figures |= measure_lag(sites, interval, seconds)
    lag = f"{figures['replication_lag_p95_s']} s"
    print(f"  lag p95 {lag} at {figures['changes_per_s']} changes/s", flush=True)
    return figures


def configure_settings() -> None:
    """Configure Django for a process that uses no database, so that none is started for it."""
    os.environ |= {
        "DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none",
        "REDIS_URL": "redis://127.0.0.1:1/0",
        "DJANGO_SETTINGS_MODULE": "coordinator.settings",
        "BARNRAISE_LOG": "WARNING",
        "NO_PROXY": "*",
    }


def main() -> None:
    """Run the measurement that the arguments name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of everything")
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the changes")
    parser.add_argument("--rate", type=float, default=50.0, help="changes a second")
    options = parser.parse_args()
    divisor = 10 if options.quick else 1
    configure_settings()
    with ExitStack() as cleanup:
        temporary = tempfile.TemporaryDirectory(
            prefix="barnraise-mirrors-", ignore_cleanup_errors=True
        )
        folder = Path(cleanup.enter_context(temporary))
        folder.chmod(0o755)  # if root runs the benchmark, Postgres runs as another user
        events = options.events // divisor
        seconds = options.seconds / divisor
        figures = measure(folder, events, seconds, 1 / options.rate, cleanup)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
