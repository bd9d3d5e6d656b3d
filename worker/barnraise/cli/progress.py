"""Show how far a long task is: a bar on a terminal, elsewhere a line in the log every 10 s."""

import contextlib
import time
from collections.abc import Iterator

from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from barnraise.cli.console import errors
from barnraise.text.progress import LogProgress, ReportProgress

BAR_SECONDS = 0.1  # between two changes of a bar


@contextlib.contextmanager
def show_progress() -> Iterator[ReportProgress]:
    """Return a function that shows (stage, done, total); the bars vanish at the end."""
    if not errors.is_terminal:
        yield LogProgress()
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=errors,
        transient=True,
    ) as bars:
        yield _BarProgress(bars)


class _BarProgress:
    """One bar for each stage."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}
        self._shown = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage.capitalize(), total=max(1, total))
        now = time.monotonic()
        if done >= total or now - self._shown > BAR_SECONDS:
            self._shown = now
            self._bars.update(self._tasks[stage], completed=done, total=max(1, total))
