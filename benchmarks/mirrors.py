"""What mirrors cost each other: `make bench-mirrors`, docs/benchmarks/mirrors.md.

    bootstrap   a new mirror takes in all of another: `manage.py mirror join`, from its start to its end
    lag         50 changes a second at one of two mirrors, for a minute: from each commit there until the other one has
                folded it and written its rows
    growth      what a worker's day adds to the log

Two mirrors, each with its own Postgres, Valkey, web server and Celery, and nothing between them but HTTP. Prints a line
for each part and one JSON object as its last line. `--quick`: a tenth of all. Leave the machine alone meanwhile.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import psycopg
from mirrors_site import Site, until

from coordinator.demo.mirrors import listing
from coordinator.demo.processes import free_port

HERE = Path(__file__).resolve().parent
LOOK = 0.02  # seconds between two looks at how far the second mirror has come
SETTLED = 30.0  # seconds that it has for the rest, after the last change
AWAKE = 15.0  # …until both have pulled and rest


def manage(site: Site, *command: str) -> str:
    """What a command printed there."""
    paths = os.pathsep.join(str(HERE.parent / source) for source in ("platform", "worker"))
    told = {**os.environ, **site.environment, "PYTHONPATH": paths}
    asked = [sys.executable, str(HERE.parent / "manage.py"), *command]
    done = subprocess.run(asked, env=told, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{site.name}: {' '.join(command)[:200]}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def work(site: Site, what: str, *numbers: float) -> dict[str, Any]:
    """A part of `mirrors_filling.py`, there: its last line."""
    asked = ", ".join(map(repr, (what, *numbers)))
    code = f"import sys; sys.path.append({str(HERE)!r}); import mirrors_filling; mirrors_filling.work({asked})"
    return json.loads(manage(site, "shell", "-v", "0", "-c", code).strip().splitlines()[-1])


def bootstrap(first: Site, second: Site, digest: str) -> dict[str, float]:
    """The tables of the second are there, and empty."""
    began = time.monotonic()
    manage(second, "mirror", "join", first.url, "--list", digest)
    seconds = time.monotonic() - began
    second.start_web()
    until(second.answers, "the second mirror", 60)
    manage(first, "mirror", "pull")  # the log that the second has begun
    there, here = work(first, "state"), work(second, "state")
    if there["state"] != here["state"] or here["waiting"]:
        raise SystemExit(f"the new mirror came to {here}, and the first one is at {there}")
    return {"events": there["events"], "bootstrap_s": round(seconds, 1)}


def lag(first: Site, second: Site, each: float, seconds: float) -> dict[str, float]:
    """Of every change: seconds from its commit to the moment that the other's database shows it applied."""
    first.start_celery()
    second.start_celery()
    time.sleep(AWAKE)
    origin = work(first, "state")["origin"]
    seen: list[tuple[float, int]] = []  # (when, last number of the first's log that the second has applied)
    ends = threading.Event()

    def look() -> None:
        asked = "SELECT coalesce(max(seq), 0) FROM mirrors_logevent WHERE origin_id = %s AND applied"
        with psycopg.connect(second.environment["DATABASE_URL"], autocommit=True) as connection:
            while not ends.wait(LOOK):
                row = connection.execute(asked, [origin]).fetchone()
                seen.append((time.time(), row[0]))

    watcher = threading.Thread(target=look)
    watcher.start()
    told = work(first, "change", each, seconds)
    last, deadline = told["changes"][-1][0], time.monotonic() + SETTLED
    while (not seen or seen[-1][1] < last) and time.monotonic() < deadline:
        time.sleep(0.1)
    ends.set()
    watcher.join()
    lags = sorted(lateness(told["changes"], seen))
    return {
        "changes_per_s": round(told["rate"], 1),
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


def measure(folder: Path, events: int, seconds: float, each: float, leave: ExitStack) -> dict[str, float]:
    sites = [Site(folder / name.lower(), name, free_port(8800 + 10 * n)) for n, name in enumerate(("North", "East"))]
    first, second = sites
    signed, file = listing(folder, sites), folder / "list.json"
    assert signed
    file.write_text(signed.model_dump_json())
    for site in sites:
        leave.callback(site.stop)
        site.start_servers()
    for site in sites:
        until(site.has_servers, f"{site.name}'s servers", 120)
        manage(site, "migrate", "-v", "0")
    manage(first, "mirrors", "publish", str(file), "--first")
    first.start_web()
    until(first.answers, "the first mirror", 60)
    filled = work(first, "fill", events)
    print(f"  {filled['events']:,} events in the first log, folded there in {filled['seconds']:.0f} s", flush=True)
    found = bootstrap(first, second, signed.digest)
    print(f"  the second mirror took them in within {found['bootstrap_s']} s", flush=True)
    found |= work(first, "growth")
    print(f"  a worker's day: {found['log_bytes_per_worker_day']:,} bytes", flush=True)
    found |= lag(first, second, each, seconds)
    print(f"  lag p95 {found['replication_lag_p95_s']} s at {found['changes_per_s']} changes/s", flush=True)
    return found


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
        name = leave.enter_context(tempfile.TemporaryDirectory(prefix="barnraise-mirrors-", ignore_cleanup_errors=True))
        Path(name).chmod(0o755)  # where root runs it, Postgres has a user of its own
        found = measure(Path(name), told.events // part, told.seconds / part, 1 / told.rate, leave)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
