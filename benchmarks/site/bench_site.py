"""What one site bears: `make bench-site`, docs/benchmarks/site.md.

    pages   how long pages take with 1,000 runs and 100,000 machines in the database, without any load
    30 s    2,000 workers that report every 30 s, and 2,000 browsers on one run, for five minutes
    10 s    the same, reporting every 10 s, for two minutes

Everything is real and on this machine, the load included: Postgres and Valkey (embedded), Celery's worker and beat,
uvicorn, signed requests, websockets. Prints tables as it goes and one JSON object as its last line. `--quick`: a
minute, with a tenth of all. Leave the machine alone meanwhile.
"""

import argparse
import asyncio
import gc
import json
import resource
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import uvloop
from site_stack import Site

WARM = 0.1  # of a load's time, at its beginning, that does not count
RAMP = 40.0  # watchers a second that come
EVERY = 5.0  # seconds between two looks at what the processes use
NAP = 0.02  # seconds that the load sleeps to see how late it is


async def load(
    site: Site, run, workers: list, watchers: int, every: float, seconds: float
) -> dict[str, Any]:
    """One load's figures."""
    from site_watchers import Heard, Watcher, percentile
    from site_workers import Posts

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asyncio.current_task().cancel)
    posts, heard = Posts(), Heard()
    working = [asyncio.create_task(worker.work(every, posts)) for worker in workers]
    began, sockets = time.monotonic(), []
    for n in range(watchers):
        await asyncio.sleep(max(0.0, began + n / RAMP - time.monotonic()))
        sockets.append(asyncio.create_task(Watcher(str(run.pk), site.port, heard, n == 0).watch()))
    opened = await asyncio.gather(*sockets, return_exceptions=True)
    if failed := [each for each in opened if isinstance(each, Exception)]:
        print(
            f"{len(failed)} watchers did not come in: {failed[0]!r}\n{site.family.log_tail('web')}",
            flush=True,
        )
    came = time.monotonic() - began
    print(f"{heard.snapshots} watchers in after {came:.0f} s", flush=True)
    warm = WARM * seconds
    counts, posts.ends = time.monotonic() + warm, (ends := time.monotonic() + seconds)
    await asyncio.sleep(warm)
    late = Lateness()
    noting = asyncio.create_task(late.measure())
    used = [(time.monotonic(), await asyncio.to_thread(site.used))]
    heard_before = heard.bytes
    while time.monotonic() < ends:
        await asyncio.sleep(EVERY)
        used.append((time.monotonic(), await asyncio.to_thread(site.used)))
    heard_bytes = heard.bytes - heard_before
    span = time.monotonic() - used[0][0]
    noting.cancel()
    await asyncio.gather(*working)
    await asyncio.sleep(5)
    heard.leaving = True
    took = sorted(ms for at, ms in posts.milliseconds if at >= counts)
    effects = heard.effects(posts.sent, counts)
    (first_at, first), (last_at, last) = used[0], used[-1]
    held = [sum(size for part, (_, size) in parts.items() if part != "load") for _, parts in used]
    cores = {name: (last[name][0] - first[name][0]) / (last_at - first_at) for name in last}
    return {
        "every": every, "came_in_s": round(came, 1),
        "reports": len(posts.sent), "confirmed": posts.confirmed, "failed": posts.failed,
        "report_p50_ms": round(median(took), 1), "report_p99_ms": _p99(took),
        "report_p99_ms_each_30_s": _each(posts.milliseconds, counts - warm, 30.0),
        "effect_p50_s": round(percentile(effects, 0.5), 2), "effect_p95_s": round(percentile(effects, 0.95), 2),
        **late.figures(), "gaps": heard.gaps, "closed": heard.closed, "deltas": len(heard.arrivals),
        "watchers": heard.snapshots, "megabytes_a_second": round(heard_bytes / 1e6 / span, 1),
        "cores": {name: round(share, 2) for name, share in cores.items()},
        "megabytes": {name: round(each[1] / 1e6) for name, each in last.items()},
        "memory_growth_mb": round(_growth(held) / 1e6, 1),
    }  # fmt: skip


def _p99(ascending: list[float]) -> float:
    return round(ascending[int(0.99 * len(ascending))], 1)


def _each(milliseconds: list[tuple[float, float]], began: float, span: float) -> list[float]:
    """The p99 of each span of the load, its beginning included: what arrivals left behind is seen to go."""
    spans: dict[int, list[float]] = {}
    for at, took in milliseconds:
        spans.setdefault(int((at - began) // span), []).append(took)
    return [_p99(sorted(took)) for n, took in sorted(spans.items()) if n >= 0]


class Lateness:
    """How late the load itself is: by how much each of its short sleeps was too long."""

    def __init__(self) -> None:
        self.milliseconds: list[float] = []

    async def measure(self) -> None:
        """Until it is cancelled."""
        while True:
            due = time.monotonic() + NAP
            await asyncio.sleep(NAP)
            self.milliseconds.append(1000 * (time.monotonic() - due))

    def figures(self) -> dict[str, float]:
        took = sorted(self.milliseconds)
        return {"load_late_p99_ms": _p99(took), "load_late_most_ms": round(took[-1], 1)}


def _growth(sizes: list[float]) -> float:
    """Between the means of the first and the last third: one look may fall into the middle of a task."""
    third = max(1, len(sizes) // 3)
    return sum(sizes[-third:]) / third - sum(sizes[:third]) / third


def lost(run, sent: int, seconds: float = 60.0) -> int:
    """Reports that Postgres does not hold once it has had its time; negative where some count twice."""
    from django.db.models import Sum

    from coordinator.telemetry.models import Rollup

    deadline, held = time.monotonic() + seconds, -1
    while held != sent and time.monotonic() < deadline:
        time.sleep(1)
        held = (
            Rollup.objects.filter(membership__run=run, width=3600).aggregate(sum=Sum("reports"))[
                "sum"
            ]
            or 0
        )
    return sent - held


def main() -> None:
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked.add_argument("--quick", action="store_true")
    asked.add_argument("--workers", type=int)
    asked.add_argument("--watchers", type=int)
    asked.add_argument("--seconds", type=float)
    asked.add_argument("--web", type=int, default=2, help="processes that serve the web")
    asked.add_argument("--only", choices=["pages", "30", "10"])
    told = asked.parse_args()
    workers = told.workers or (200 if told.quick else 2000)
    watchers = told.watchers if told.watchers is not None else (200 if told.quick else 2000)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit("stopped")
    )  # past the finally below, not around it
    folder = Path(tempfile.mkdtemp(prefix="barnraise-bench-"))
    site = Site(folder, told.web)
    result: dict[str, Any] = {"workers": workers, "watchers": watchers}
    try:
        result |= measured(site, told, workers, watchers)
    finally:
        site.stop()
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(result))


def measured(site: Site, told: argparse.Namespace, workers: int, watchers: int) -> dict[str, Any]:
    import seed_site
    from site_pages import pages, table
    from site_workers import Worker

    from coordinator.lib import site_identity
    from coordinator.runs.models import Run

    like = seed_site.launched("The first", 30.0)
    result: dict[str, Any] = {}
    if told.only in (None, "pages"):
        began = time.monotonic()
        many = (100, 10_000) if told.quick else (1000, 100_000)
        seed_site.runs(like, *many)
        print(
            f"{many[0]:,} runs and {many[1]:,} machines in {time.monotonic() - began:.0f} s",
            flush=True,
        )
    site.start()
    if told.only in (None, "pages"):
        found = pages(site.url, 5 if told.quick else 40)
        print(table(found), flush=True)
        every_one = sorted(ms for took in found.values() for ms in took)
        result["page_p95_ms"] = round(every_one[int(0.95 * len(every_one))], 1)
    hands = seed_site.hands(like, workers) if told.only != "pages" else []
    crew: list[Worker] = []
    crew.extend(Worker(hand, crew, like, site_identity.identity().key, site.port) for hand in hands)
    gc.collect()
    gc.freeze()  # else the load stops for a third of a second now and then, to look through all of Django
    seconds = told.seconds or (60.0 if told.quick else 300.0)
    before = 0  # reports of the loads before
    for every, long in ((30.0, seconds), (10.0, min(120.0, seconds))):
        if told.only in (None, str(int(every))) and crew:
            Run.objects.filter(pk=like.pk).update(report_every=every)
            figures = uvloop.run(load(site, like, crew, watchers, every, long))
            before += figures["reports"]
            figures["lost_reports"] = lost(like, before)
            print(json.dumps(figures), flush=True)
            names = ("report_p99_ms", "effect_p95_s", "lost_reports", "memory_growth_mb")
            result |= {
                name if every == 30.0 else f"{name}_at_10_s": figures[name] for name in names
            }
    return result


if __name__ == "__main__":
    main()
