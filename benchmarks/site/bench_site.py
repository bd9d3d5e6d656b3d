"""Measure what one site bears: `make bench-site`, docs/benchmarks/site.md.

    pages   how long pages take with 1,000 runs and 100,000 machines in the database, without load
    load    2,000 workers and 2,000 browsers on one run with the default report interval, which the
            site stretches by its load, for five minutes

Everything is real and on this machine, including the load: Postgres and Valkey (embedded), Celery's
worker and beat, uvicorn, signed requests, websockets. The script prints tables as it goes, and one
JSON object as its last line. `--quick`: a tenth of everything, about 3 minutes. Run nothing else on
the machine meanwhile.
"""

import argparse
import asyncio
import gc
import json
import resource
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import uvloop

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))

from child_processes import ChildProcesses
from site_stack import Site

if TYPE_CHECKING:  # these import Django's models, which need the settings that `Site` prepares
    from site_watchers import ReceivedDeltas
    from site_workers import SimulatedWorker

    from coordinator.runs.models import Run

WARM_UP_SHARE = 0.1  # of a load's time, at its beginning, that does not count
ARRIVALS_PER_SECOND = 40.0  # of watchers
USAGE_SECONDS = 5.0  # between two measurements of what the processes use
SLEEP_SECONDS = 0.02  # that the load sleeps to measure its own delay


@dataclass(frozen=True)
class LoadSize:
    """The size of one load: watchers, seconds between two reports, and its duration in seconds."""

    watchers: int
    report_every: float
    seconds: float


async def open_watchers(site: Site, run: "Run", count: int, received: "ReceivedDeltas") -> float:
    """Open the watchers' websockets at the arrival rate; return the seconds that this took."""
    from site_watchers import Watcher

    start = time.monotonic()
    sockets = []
    for n in range(count):
        await asyncio.sleep(max(0.0, start + n / ARRIVALS_PER_SECOND - time.monotonic()))
        watcher = Watcher(str(run.pk), site.port_of(n), received, n == 0)
        sockets.append(asyncio.create_task(watcher.watch()))
    results = await asyncio.gather(*sockets, return_exceptions=True)
    if failed := [result for result in results if isinstance(result, BaseException)]:
        log_tail = site.processes.log_tail("web")
        print(f"{len(failed)} watchers failed to connect: {failed[0]!r}\n{log_tail}", flush=True)
    seconds = time.monotonic() - start
    print(f"{received.snapshots} watchers in after {seconds:.0f} s", flush=True)
    return seconds


async def run_load(
    site: Site, run: "Run", workers: "list[SimulatedWorker]", size: LoadSize
) -> dict[str, Any]:
    """Apply one load and return its figures."""
    from site_watchers import ReceivedDeltas, percentile
    from site_workers import PostResults

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    posts = PostResults()
    received = ReceivedDeltas()
    working = [asyncio.create_task(worker.work(size.report_every, posts)) for worker in workers]
    arrival_seconds = await open_watchers(site, run, size.watchers, received)

    # Let the arrival's backlog shrink before anything counts.
    warm_up = WARM_UP_SHARE * size.seconds
    counts_from = time.monotonic() + warm_up
    ends = time.monotonic() + size.seconds
    posts.ends = ends
    await asyncio.sleep(warm_up)

    # Measure what the processes use, and how late the load itself is.
    delay = LoadDelay()
    measuring = asyncio.create_task(delay.measure())
    usage = [(time.monotonic(), await asyncio.to_thread(site.resource_usage))]
    bytes_before = received.bytes
    while time.monotonic() < ends:
        await asyncio.sleep(USAGE_SECONDS)
        usage.append((time.monotonic(), await asyncio.to_thread(site.resource_usage)))
    watched_bytes = received.bytes - bytes_before
    watched_seconds = time.monotonic() - usage[0][0]
    measuring.cancel()
    await asyncio.gather(*working)
    await asyncio.sleep(5)
    received.leaving = True

    durations = sorted(ms for at, ms in posts.milliseconds if at >= counts_from)
    delays = received.delay_histogram(posts.sent, counts_from)
    (first_at, first), (last_at, last) = usage[0], usage[-1]
    site_bytes = [
        sum(size for part, (_, size) in parts.items() if part != "load") for _, parts in usage
    ]
    cores = {name: (last[name][0] - first[name][0]) / (last_at - first_at) for name in last}
    return {
        "every": size.report_every,
        "answered_interval_s": round(median(worker.interval for worker in workers), 1),
        "came_in_s": round(arrival_seconds, 1),
        "reports": len(posts.sent),
        "confirmed": posts.confirmed,
        "failed": posts.failed,
        "report_p50_ms": round(median(durations), 1),
        "report_p99_ms": _percentile_99(durations),
        "report_p99_ms_each_30_s": _p99_by_span(posts.milliseconds, counts_from - warm_up, 30.0),
        "effect_p50_s": round(percentile(delays, 0.5), 2),
        "effect_p95_s": round(percentile(delays, 0.95), 2),
        **delay.figures(),
        "gaps": received.gaps,
        "closed": received.closed,
        "deltas": len(received.arrivals),
        "watchers": received.snapshots,
        "megabytes_a_second": round(watched_bytes / 1e6 / watched_seconds, 1),
        "cores": {name: round(share, 2) for name, share in cores.items()},
        "megabytes": {name: round(size / 1e6) for name, (_, size) in last.items()},
        "memory_growth_mb": round(_measure_growth(site_bytes) / 1e6, 1),
    }


def _percentile_99(ascending: list[float]) -> float:
    return round(ascending[int(0.99 * len(ascending))], 1)


def _p99_by_span(milliseconds: list[tuple[float, float]], start: float, span: float) -> list[float]:
    """Return the p99 of each span of the load, warm-up included.

    It shows how the backlog that the watchers' arrival leaves behind disappears.
    """
    spans: dict[int, list[float]] = {}
    for at, duration in milliseconds:
        spans.setdefault(int((at - start) // span), []).append(duration)
    return [_percentile_99(sorted(durations)) for n, durations in sorted(spans.items()) if n >= 0]


class LoadDelay:
    """Measure how late the load itself is: by how much each of its short sleeps is too long."""

    def __init__(self) -> None:
        self.milliseconds: list[float] = []

    async def measure(self) -> None:
        """Measure until the task is cancelled."""
        while True:
            due = time.monotonic() + SLEEP_SECONDS
            await asyncio.sleep(SLEEP_SECONDS)
            self.milliseconds.append(1000 * (time.monotonic() - due))

    def figures(self) -> dict[str, float]:
        """Return the p99 and the maximum."""
        ascending = sorted(self.milliseconds)
        return {
            "load_late_p99_ms": _percentile_99(ascending),
            "load_late_most_ms": round(ascending[-1], 1),
        }


def _measure_growth(sizes: list[float]) -> float:
    """Return the mean of the last third less that of the first.

    A single measurement may fall into the middle of a task.
    """
    third = max(1, len(sizes) // 3)
    return sum(sizes[-third:]) / third - sum(sizes[:third]) / third


def count_lost_reports(run: "Run", sent: int, seconds: float = 60.0) -> int:
    """Return how many of `sent` reports Postgres lacks after at most `seconds`.

    The number is negative if some reports count twice.
    """
    from django.db.models import Sum

    from coordinator.telemetry.models import Rollup

    rollups = Rollup.objects.filter(membership__run=run, width=3600)
    deadline = time.monotonic() + seconds
    stored = -1
    while stored != sent and time.monotonic() < deadline:
        time.sleep(1)
        stored = rollups.aggregate(sum=Sum("reports"))["sum"] or 0
    return sent - stored


def measure_pages(site: Site, quick: bool) -> float:
    """Measure all pages, print a table, and return the p95 over all requests in milliseconds."""
    import site_pages

    durations = site_pages.measure_pages(site.url, 5 if quick else 40)
    print(site_pages.format_table(durations), flush=True)
    ascending = sorted(ms for page in durations.values() for ms in page)
    return round(ascending[int(0.95 * len(ascending))], 1)


def measure_load(
    site: Site, run: "Run", workers: int, watchers: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Apply the load and return the figures of the last line."""
    import seed_site
    from site_workers import SimulatedWorker

    from coordinator.lib import site_identity

    simulated: list[SimulatedWorker] = []
    mirror = site_identity.identity().key
    for n, machine in enumerate(seed_site.enrol_machines(run, workers)):
        simulated.append(SimulatedWorker(machine, simulated, run, mirror, site.port_of(n)))
    # Without this the load stops for a third of a second now and then, to look through all objects.
    gc.collect()
    gc.freeze()
    seconds = options.seconds or (60.0 if options.quick else 300.0)
    size = LoadSize(watchers, run.report_every, seconds)
    figures = uvloop.run(run_load(site, run, simulated, size))
    site.children.catch_signals()
    figures["lost_reports"] = count_lost_reports(run, figures["reports"])
    print(json.dumps(figures), flush=True)
    names = ("report_p99_ms", "effect_p95_s", "lost_reports", "memory_growth_mb")
    return {name: figures[name] for name in (*names, "answered_interval_s")}


def measure(site: Site, workers: int, watchers: int, options: argparse.Namespace) -> dict[str, Any]:
    """Fill the site, start it, and measure the pages and the load, or the part that is named."""
    import seed_site

    from coordinator.runs.models import NewRun

    run = seed_site.create_training_run("The first", NewRun.report_every)
    result: dict[str, Any] = {}
    with_pages = options.only in (None, "pages")
    if with_pages:
        start = time.monotonic()
        runs, machines = (100, 10_000) if options.quick else (1000, 100_000)
        seed_site.create_past_runs(run, runs, machines)
        seconds = time.monotonic() - start
        print(f"{runs:,} runs and {machines:,} machines in {seconds:.0f} s", flush=True)
    site.start()
    if with_pages:
        result["page_p95_ms"] = measure_pages(site, options.quick)
    if options.only != "pages":
        result |= measure_load(site, run, workers, watchers, options)
    return result


def main() -> None:
    """Run the measurement that the arguments name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of everything")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--watchers", type=int)
    parser.add_argument("--seconds", type=float, help="duration of the load")
    parser.add_argument("--web", type=int, default=2, help="number of web processes")
    parser.add_argument("--hosts", type=int, default=1, help="that the web processes are dealt to")
    parser.add_argument("--only", choices=["pages", "load"], help="measure only this part")
    options = parser.parse_args()
    default = 200 if options.quick else 2000
    workers = options.workers or default
    watchers = default if options.watchers is None else options.watchers
    _, max_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))
    result: dict[str, Any] = {"workers": workers, "watchers": watchers, "hosts": options.hosts}
    with ExitStack() as cleanup:
        temporary = tempfile.TemporaryDirectory(
            prefix="barnraise-bench-", ignore_cleanup_errors=True
        )
        folder = Path(cleanup.enter_context(temporary))
        site = Site(folder, options.web, ChildProcesses(folder, cleanup), options.hosts)
        cleanup.callback(site.stop)
        result |= measure(site, workers, watchers, options)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
