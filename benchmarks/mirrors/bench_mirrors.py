"""What mirrors cost each other: `make bench-mirrors`, docs/benchmarks/mirrors.md.

    bootstrap   a new mirror takes in all of another: `manage.py replication join`, from its start to its end
    lag         50 changes a second, half of them at each of two mirrors, for a minute: from each commit until the other
                one has folded it and written its rows
    growth      what a worker's day adds to the log

Two mirrors, each with its own Postgres, Valkey, web server and Celery, and nothing between them but HTTP. Prints a line
for each part and one JSON object as its last line. `--quick`: a tenth of all. Leave the machine alone meanwhile.
"""

import argparse
import json
import os
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import psycopg
from mirror_site import Site, until

from coordinator.demo.mirrors import build_mirror_list
from coordinator.demo.processes import free_port

HERE = Path(__file__).resolve().parent
LOOK = 0.05  # seconds between two looks at how far the other mirror has come
APPLIED = """
    SELECT seq FROM eventlog_logevent WHERE origin_id = %s
    AND NOT EXISTS (SELECT FROM eventlog_aggregate WHERE name = aggregate AND (stale OR NOT projected))
    ORDER BY seq DESC LIMIT 1
"""
SETTLED = 30.0  # seconds that it has for the rest, after the last change
AWAKE = 15.0  # seconds until both have pulled and are idle


def work(site: Site, what: str, *numbers: float) -> dict[str, Any]:
    """A part of `seed_data.py`, there: its last line."""
    asked = ", ".join(map(repr, (what, *numbers)))
    code = f"import sys; sys.path += [{str(HERE)!r}, {str(HERE.parent / 'site')!r}]; import seed_data; seed_data.work({asked})"
    return json.loads(site.manage("shell", "-v", "0", "-c", code).strip().splitlines()[-1])


def bootstrap(first: Site, second: Site, digest: str) -> dict[str, float]:
    """The tables of the second are there, and empty."""
    began = time.monotonic()
    second.manage("replication", "join", first.url, "--list", digest)
    seconds = time.monotonic() - began
    second.start_web()
    until(second.answers, "the second mirror", 60)
    first.manage("replication", "pull")  # the log that the second has begun
    there, here = work(first, "state"), work(second, "state")
    if there["state"] != here["state"] or here["waiting"]:
        raise SystemExit(f"the new mirror came to {here}, and the first one is at {there}")
    return {"events": there["events"], "bootstrap_s": round(seconds, 1)}


class Watch(threading.Thread):
    """Of a log, how far another mirror's database shows it applied: (when, number), until it is told to end."""

    def __init__(self, origin: str, there: Site):
        super().__init__(daemon=True)
        self.origin, self.url, self.ends = (
            origin,
            there.environment["DATABASE_URL"],
            threading.Event(),
        )
        self.seen: list[tuple[float, int]] = []

    def run(self) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            while not self.ends.wait(LOOK):
                row = connection.execute(APPLIED, [self.origin]).fetchone()
                self.seen.append((time.time(), row[0] if row else 0))

    def has(self, number: int) -> bool:
        return bool(self.seen) and self.seen[-1][1] >= number


def lag(sites: list[Site], each: float, seconds: float) -> dict[str, float]:
    """Changes at all of two mirrors. Of every one: seconds from its commit there to the moment that the other one's
    database shows it applied."""
    for site in sites:
        site.start_celery()
    time.sleep(AWAKE)
    watches = [
        Watch(work(site, "state")["origin"], other)
        for site, other in zip(sites, sites[::-1], strict=True)
    ]
    for watch in watches:
        watch.start()
    with ThreadPoolExecutor(len(sites)) as crew:
        asked = [
            crew.submit(work, site, "change", each * len(sites), seconds, n)
            for n, site in enumerate(sites)
        ]
        told = [each.result() for each in asked]
    deadline, lags = time.monotonic() + SETTLED, []
    for watch, made in zip(watches, told, strict=True):
        while not watch.has(made["changes"][-1][0]) and time.monotonic() < deadline:
            time.sleep(0.1)
        watch.ends.set()
        watch.join()
        lags += lateness(made["changes"], watch.seen)
    lags.sort()
    return {
        "changes_per_s": round(sum(made["rate"] for made in told), 1),
        "replication_lag_p50_s": round(median(lags), 2),
        "replication_lag_p95_s": round(lags[int(0.95 * (len(lags) - 1))], 2),
        "replication_lag_max_s": round(lags[-1], 2),
    }


def lateness(changes: list[tuple[int, float]], seen: list[tuple[float, int]]) -> list[float]:
    """Seconds from each change's commit until it was seen; `SETTLED` for one that never was."""
    lags, place = [], 0
    for number, committed in changes:
        while place < len(seen) and seen[place][1] < number:
            place += 1
        lags.append(seen[place][0] - committed if place < len(seen) else SETTLED)
    return lags


def measure(
    folder: Path, events: int, seconds: float, each: float, leave: ExitStack
) -> dict[str, float]:
    sites = [
        Site(folder / name.lower(), name, free_port(8800 + 10 * n))
        for n, name in enumerate(("North", "East"))
    ]
    first, second = sites
    signed, file = build_mirror_list(folder, sites), folder / "list.json"
    assert signed
    file.write_text(signed.model_dump_json())
    for site in sites:
        leave.callback(site.stop)
        site.start_servers()
    for site in sites:
        until(site.find_servers, f"{site.name}'s servers", 120)
        site.manage("migrate", "-v", "0")
    first.manage("mirror_list", "publish", str(file), "--first")
    first.start_web()
    until(first.answers, "the first mirror", 60)
    filled = work(first, "fill", events)
    print(
        f"  {filled['events']:,} events in the first log, folded there in {filled['seconds']:.0f} s",
        flush=True,
    )
    found = bootstrap(first, second, signed.digest)
    print(f"  the second mirror took them in within {found['bootstrap_s']} s", flush=True)
    found |= work(first, "growth")
    print(f"  a worker's day: {found['log_bytes_per_worker_day']:,} bytes", flush=True)
    found |= lag(sites, each, seconds)
    print(
        f"  lag p95 {found['replication_lag_p95_s']} s at {found['changes_per_s']} changes/s",
        flush=True,
    )
    return found


def main() -> None:
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked.add_argument("--quick", action="store_true", help="a tenth of all")
    asked.add_argument("--events", type=int, default=100_000)
    asked.add_argument("--seconds", type=float, default=60.0, help="of changes")
    asked.add_argument("--rate", type=float, default=50.0, help="changes a second")
    told = asked.parse_args()
    part = 10 if told.quick else 1
    os.environ |= {  # this process speaks with no database: the settings are not to start one
        "DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none", "REDIS_URL": "redis://127.0.0.1:1/0",
        "DJANGO_SETTINGS_MODULE": "coordinator.settings", "BARNRAISE_LOG": "WARNING", "NO_PROXY": "*",
    }  # fmt: skip
    with ExitStack() as leave:
        name = leave.enter_context(
            tempfile.TemporaryDirectory(prefix="barnraise-mirrors-", ignore_cleanup_errors=True)
        )
        Path(name).chmod(0o755)  # where root runs it, Postgres has a user of its own
        found = measure(Path(name), told.events // part, told.seconds / part, 1 / told.rate, leave)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
