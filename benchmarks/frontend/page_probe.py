"""Measure pages in a headless Chromium: time until usable, main thread, memory, shifts, axe."""

import gzip
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from playwright.sync_api import Browser, BrowserContext, CDPSession, Page, Response, WebSocketRoute

CPU_SLOWDOWN = 4
QUIET_MS = 1_000  # without a long task after which a page counts as usable
LONG_WAIT_MS = 120_000
FRAME_MS = 50  # between two deltas of a replay: twenty times as fast as a site sends them

# Records when the live page is drawn, its long tasks, and every shift that no reader caused.
OBSERVE = """
window.probe = {drawn: null, longTasks: [], shifts: [], deltas: 0};
window.WebSocket = class extends WebSocket {
  constructor(...address) {
    super(...address);
    this.addEventListener('message', () => { probe.deltas += 1; });
  }
};
new PerformanceObserver((list) => {
  for (const e of list.getEntries()) probe.longTasks.push([e.startTime, e.duration]);
}).observe({type: 'longtask', buffered: true});
new PerformanceObserver((list) => {
  for (const e of list.getEntries()) {
    if (e.hadRecentInput) continue;
    const sources = e.sources.map((s) => s.node?.parentElement?.className + '>' + s.node?.nodeName +
      '.' + s.node?.className);
    probe.shifts.push([e.startTime, e.value, sources.join(' ')]);
  }
}).observe({type: 'layout-shift', buffered: true});
const watch = () => {
  const isLive = document.querySelector('[data-connection=live]');
  const isDrawn = document.querySelector('[data-loss-chart] .uplot canvas');
  if (isLive && isDrawn && probe.drawn === null) probe.drawn = performance.now();
  if (probe.drawn === null) requestAnimationFrame(watch);
};
requestAnimationFrame(watch);
"""
# The time at which the page was drawn and had no more long task: its reader can act.
USABLE = """([quiet]) => {
  if (probe.drawn === null) return null;
  let end = probe.drawn;
  for (const [start, duration] of probe.longTasks) {
    if (start < end + quiet) end = Math.max(end, start + duration);
  }
  return performance.now() > end + quiet ? end : null;
}"""


@dataclass
class LoadedScripts:
    """The JavaScript that a page loads, by address, in compressed bytes."""

    sizes: dict[str, int] = field(default_factory=dict)

    def add(self, response: Response) -> None:
        """Add a response if it is a script."""
        if response.request.resource_type == "script" and response.ok:
            self.sizes[response.url] = len(gzip.compress(response.body(), 9))

    @property
    def kilobytes(self) -> float:
        """The sum in kB."""
        return round(sum(self.sizes.values()) / 1000, 1)


@contextmanager
def open_context(browser: Browser, url: str, session: str = "") -> Iterator[BrowserContext]:
    """Open a browser context, signed in if there is a session's cookie."""
    context = browser.new_context(
        base_url=url, viewport={"width": 1280, "height": 900}, reduced_motion="reduce"
    )
    context.set_default_timeout(LONG_WAIT_MS)
    context.add_init_script(OBSERVE)
    if session:
        context.add_cookies([{"name": "sessionid", "value": session, "url": url}])
    try:
        yield context
    finally:
        context.close()


def slow_down(page: Page) -> CDPSession:
    """Slow the page's processor down."""
    session = page.context.new_cdp_session(page)
    session.send("Emulation.setCPUThrottlingRate", {"rate": CPU_SLOWDOWN})
    return session


def measure_main_thread(page: Page, path: str) -> dict[str, float]:
    """Open a run's page without slowing it down, and return what its main thread does until usable.

    The thread's own time depends little on what else the computer does: it shows on a busy one
    what the slowed down page would take on an idle one.
    """
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    seconds = _open_until_usable(page, path)
    metrics = _read_metrics(session)
    return {
        "usable_s": seconds,
        "main_thread_ms": round(1000 * metrics["TaskDuration"], 1),
        "script_ms": round(1000 * metrics["ScriptDuration"], 1),
    }


def measure_interactive(page: Page, path: str) -> float:
    """Open a run's page and return the seconds until it is drawn, live and quiet."""
    slow_down(page)
    return _open_until_usable(page, path)


def _open_until_usable(page: Page, path: str) -> float:
    page.goto(path, wait_until="commit")
    ends = time.monotonic() + LONG_WAIT_MS / 1000
    # The content security policy forbids Playwright's own waiting for an expression.
    while (usable := page.evaluate(USABLE, [QUIET_MS])) is None:
        if time.monotonic() > ends:
            raise TimeoutError(f"{path} was not usable within {LONG_WAIT_MS // 1000} s")
        page.wait_for_timeout(200)
    return round(usable / 1000, 2)


def measure_deltas(page: Page, seconds: float, report: Callable[[], None]) -> dict[str, float]:
    """Measure the main thread's work for each delta that arrives while machines report.

    Args:
        page: a run's page that is live, slowed down.
        seconds: how long.
        report: lets some machines report; called once a second.
    """
    session = page.context.new_cdp_session(page)
    # The thread's own time: that in which other programs use the processor does not count.
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.evaluate("probe.longTasks.length = 0")
    first = page.evaluate("probe.deltas")
    before = _read_metrics(session)
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        report()
        page.wait_for_timeout(1_000)
    after = _read_metrics(session)
    deltas = page.evaluate("probe.deltas") - first
    longest = page.evaluate("Math.max(0, ...probe.longTasks.map(([, duration]) => duration))")

    def spent(name: str) -> float:
        return round(1000 * (after[name] - before[name]) / max(1, deltas), 2)

    return {
        "deltas": deltas,
        "delta_ms": spent("TaskDuration"),
        "script_ms": spent("ScriptDuration"),
        "layout_ms": spent("LayoutDuration"),
        "longest_task_ms": round(longest, 1),
    }


def _read_metrics(session: CDPSession) -> dict[str, float]:
    metrics = session.send("Performance.getMetrics")["metrics"]
    return {metric["name"]: metric["value"] for metric in metrics}


class DeltaReplay:
    """Serves a page's websocket with deltas that continue a real snapshot.

    Each delta changes a tenth of the machines and adds a point to each curve, as a site's would.
    """

    def __init__(self, snapshot: dict[str, Any]) -> None:
        """Continue after this snapshot."""
        self._number = snapshot["seq"]
        self._now = snapshot["now"]
        self._tokens = snapshot["run"]["tokens"]
        self._workers = snapshot["workers"]
        self._socket: WebSocketRoute | None = None
        self.sent = 0

    def accept(self, socket: WebSocketRoute) -> None:
        """Serve this socket."""
        self._socket = socket

    @property
    def is_connected(self) -> bool:
        """Whether the page has opened its socket."""
        return self._socket is not None

    def send_delta(self) -> None:
        """Send the next delta."""
        assert self._socket
        self._number += 1
        self._now += 1.0
        self._tokens += 40_000
        tenth = max(1, len(self._workers) // 10)
        start = self._number * tenth % max(1, len(self._workers))
        changed = self._workers[start : start + tenth]
        for worker in changed:
            worker["step"] += 1
            worker["tokens"] += 2_000
            worker["last_seen"] = self._now
        slot = self._now // 5 * 5
        delta = {
            "type": "delta",
            "seq": self._number,
            "now": self._now,
            "run": {"tokens": self._tokens, "rate": 2e5 + self._number % 977},
            "worker_changes": [
                {name: worker[name] for name in ("id", "step", "tokens", "last_seen")}
                for worker in changed
            ],
            "train": [[self._tokens, 2.8 + self._number % 89 / 1000]],
            "clock": [[self._tokens, self._now]],
            "learning_rate": [[self._tokens, 6e-4]],
            "gradient_norm": [[self._tokens, 0.5 + self._number % 31 / 100]],
        }
        if self._number % 5 == 0:
            delta |= {
                name: [[slot, value]]
                for name, value in (("rate", 2e5), ("machines", 200), ("sent", 1e7))
            }
        self._socket.send(json.dumps(delta))
        self.sent += 1


def measure_memory(page: Page, path: str, run: str, deltas: int) -> dict[str, float]:
    """Replay deltas on a run's page, and return how much its memory has grown.

    The growth is from after a quarter of the deltas, when the curves are as long as they become, to
    the end, each after the garbage was collected.
    """
    response = page.request.get(f"/live/{run}/")
    replay = DeltaReplay(response.json())
    page.route_web_socket(re.compile("/ws/runs/"), replay.accept)
    page.goto(path)
    page.locator("[data-connection=live]").wait_for()
    while not replay.is_connected:
        page.wait_for_timeout(50)
    session = page.context.new_cdp_session(page)
    first = 0.0
    for number in range(deltas):
        replay.send_delta()
        page.wait_for_timeout(FRAME_MS)
        if number == deltas // 4:
            first = _measure_heap(session)
    last = _measure_heap(session)
    shown = page.locator("[data-figure=rate]").inner_text()
    return {
        "deltas": replay.sent,
        "first_mb": round(first / 1e6, 2),
        "last_mb": round(last / 1e6, 2),
        "memory_growth": round(last / first - 1, 3),
        "shows_a_rate": float(shown != "–"),
    }


def _measure_heap(session: CDPSession) -> float:
    """Return the bytes of the page's JavaScript heap after collecting garbage."""
    for _ in range(2):
        session.send("HeapProfiler.collectGarbage")
    return session.send("Runtime.getHeapUsage")["usedSize"]


def measure_shift(page: Page) -> tuple[float, str]:
    """Return the cumulative layout shift so far, and what shifted most.

    As web.dev defines it: the largest sum of shifts within five seconds that are less than a second
    apart.
    """
    shifts = page.evaluate("probe.shifts")
    worst, window, first, last = 0.0, 0.0, -1e9, -1e9
    for at, value, _ in shifts:
        if at - last > 1_000 or at - first > 5_000:
            window, first = 0.0, at
        window += value
        last = at
        worst = max(worst, window)
    largest = max(shifts, key=lambda shift: shift[1], default=(0, 0, ""))
    return round(worst, 4), largest[2]
