"""Measure pages in a headless Chromium: time until usable, main thread, memory, shifts, axe."""

import gzip
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from playwright.sync_api import (
    Browser,
    BrowserContext,
    CDPSession,
    Page,
    Response,
    ViewportSize,
    WebSocketRoute,
)

WINDOW: ViewportSize = {"width": 1280, "height": 900}
CPU_SLOWDOWN = 4
QUIET_MS = 1_000  # without a long task after which a page counts as usable
LONG_WAIT_MS = 120_000
FRAME_MS = 50  # between two deltas of a replay: twenty times as fast as a site sends them

# Records when the live page is drawn, its long tasks, and every shift that no reader caused.
OBSERVE = """
window.probe = {drawn: null, longTasks: [], shifts: []};
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
    context = browser.new_context(base_url=url, viewport=WINDOW, reduced_motion="reduce")
    context.set_default_timeout(LONG_WAIT_MS)
    context.add_init_script(OBSERVE)
    if session:
        context.add_cookies([{"name": "sessionid", "value": session, "url": url}])
    try:
        yield context
    finally:
        context.close()


class BarePage:
    """A page that Playwright does not control: its main thread does the work of a reader's.

    The main thread of a page that Playwright controls also reports all that happens in the network:
    more than a millisecond for each delta of a page that is slowed down.
    """

    def __init__(self, browser: Browser, url: str, slowdown: int = 1) -> None:
        """Open an empty page, on whose processor each task takes `slowdown` times as long."""
        self._url = url
        self._playwright_page = browser.new_page()  # Playwright receives answers while one waits
        self._session = browser.new_browser_cdp_session()
        # Playwright controls the pages of the contexts that it creates, and no others.
        self._context = self._session.send("Target.createBrowserContext")["browserContextId"]
        target = self._session.send(
            "Target.createTarget", {"url": "about:blank", "browserContextId": self._context}
        )
        attached = self._session.send(
            "Target.attachToTarget", {"targetId": target["targetId"], "flatten": False}
        )
        self._page_session = attached["sessionId"]
        self._answers: dict[int, dict[str, Any]] = {}
        self._last_number = 0
        self._session.on("Target.receivedMessageFromTarget", self._receive)
        self._send("Page.enable")
        self._send(
            "Emulation.setDeviceMetricsOverride",
            {**WINDOW, "deviceScaleFactor": 1, "mobile": False},
        )
        media = [{"name": "prefers-reduced-motion", "value": "reduce"}]
        self._send("Emulation.setEmulatedMedia", {"features": media})
        self._send("Emulation.setCPUThrottlingRate", {"rate": slowdown})
        self._send("Page.addScriptToEvaluateOnNewDocument", {"source": OBSERVE})
        # The thread's own time: that in which other programs use the processor does not count.
        self._send("Performance.enable", {"timeDomain": "threadTicks"})

    def close(self) -> None:
        """Close the page and its context."""
        self._session.send("Target.disposeBrowserContext", {"browserContextId": self._context})
        self._playwright_page.close()

    def goto(self, path: str, wait_until: Literal["commit"]) -> None:
        """Load a page of the site, and wait until its answer has begun."""
        assert wait_until == "commit"
        self._send("Page.navigate", {"url": self._url + path})

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        options = {"expression": expression, "returnByValue": True}
        return self._send("Runtime.evaluate", options)["result"].get("value")

    def wait_for_timeout(self, milliseconds: float) -> None:
        """Wait while the page works."""
        self._playwright_page.wait_for_timeout(milliseconds)

    def read_metrics(self) -> dict[str, float]:
        """Return what the main thread has done since the page was opened, in seconds by name."""
        metrics = self._send("Performance.getMetrics")["metrics"]
        return {metric["name"]: metric["value"] for metric in metrics}

    def _send(self, method: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
        self._last_number += 1
        number = self._last_number
        message = json.dumps({"id": number, "method": method, "params": parameters or {}})
        self._session.send(
            "Target.sendMessageToTarget", {"sessionId": self._page_session, "message": message}
        )
        while number not in self._answers:
            self.wait_for_timeout(5)
        answer = self._answers.pop(number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _receive(self, event: dict[str, Any]) -> None:
        message = json.loads(event["message"])
        if "id" in message:
            self._answers[message["id"]] = message


def measure_main_thread(page: BarePage, path: str) -> dict[str, float]:
    """Open a run's page without slowing it down, and return what its main thread does until usable.

    The thread's own time depends little on what else the computer does: it shows on a busy one
    what the slowed down page would take on an idle one.
    """
    seconds = open_until_usable(page, path)
    metrics = page.read_metrics()
    return {
        "usable_s": seconds,
        "main_thread_ms": round(1000 * metrics["TaskDuration"], 1),
        "script_ms": round(1000 * metrics["ScriptDuration"], 1),
    }


def measure_interactive(page: Page, path: str) -> float:
    """Open a run's page and return the seconds until it is drawn, live and quiet."""
    session = page.context.new_cdp_session(page)
    session.send("Emulation.setCPUThrottlingRate", {"rate": CPU_SLOWDOWN})
    return open_until_usable(page, path)


def open_until_usable(page: Page | BarePage, path: str) -> float:
    """Open a run's page and return the seconds until it is drawn, live and quiet."""
    page.goto(path, wait_until="commit")
    ends = time.monotonic() + LONG_WAIT_MS / 1000
    # The content security policy forbids Playwright's own waiting for an expression.
    while (usable := page.evaluate(f"({USABLE})([{QUIET_MS}])")) is None:
        if time.monotonic() > ends:
            raise TimeoutError(f"{path} was not usable within {LONG_WAIT_MS // 1000} s")
        page.wait_for_timeout(200)
    return round(usable / 1000, 2)


def measure_deltas(
    page: BarePage, seconds: float, report: Callable[[], None], read_number: Callable[[], int]
) -> dict[str, float]:
    """Measure the main thread's work for each delta that arrives while machines report.

    Args:
        page: a run's page that is live.
        seconds: how long.
        report: lets some machines report; called once a second.
        read_number: returns the number of the last delta that the site has sent.
    """
    page.evaluate("probe.longTasks.length = 0")
    first = read_number()
    before = page.read_metrics()
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        report()
        page.wait_for_timeout(1_000)
    after = page.read_metrics()
    deltas = read_number() - first
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
    # The replay serves the page's own socket, and not that of a web worker.
    page.add_init_script("delete window.Worker")
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


def measure_shift(page: Page | BarePage) -> tuple[float, str]:
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
