"""Log when each update became durable in a machine's ledger, and compare the logs of machines."""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from barnraise.ledger import ledger
from barnraise.protocol.messages import Signed, Update


@dataclass(frozen=True)
class Arrival:
    """An update that became durable in a ledger.

    Attributes:
        at: When, in seconds since 1970 by the machine's clock.
        author: Its author.
        seq: Its sequence number.
    """

    at: float
    author: str
    seq: int

    @property
    def key(self) -> str:
        """Return the key of its author's machine."""
        return self.author.partition(".")[0]


class ArrivalLog:
    """The log of one process, one JSON array a line."""

    def __init__(self, path: Path) -> None:
        """Append to the log at `path`."""
        self._file = path.open("a", buffering=1)

    def wrap_ledger(self) -> None:
        """Log each update that any ledger of this process accepts from now on."""
        ledger.Ledger.append_all = self._log_appends(ledger.Ledger.append_all)

    def _log_appends(
        self, append_all: Callable[..., list[ledger.Outcome]]
    ) -> Callable[..., list[ledger.Outcome]]:
        def append_and_log(
            appending: ledger.Ledger, updates: Sequence[tuple[Signed, Update]], *tickets: Any
        ) -> list[ledger.Outcome]:
            outcomes = append_all(appending, updates, *tickets)
            for (_, update), outcome in zip(updates, outcomes, strict=False):
                if outcome is ledger.Outcome.ADDED:
                    entry = [time.time(), update.author, update.seq]
                    self._file.write(json.dumps(entry) + "\n")
            return outcomes

        return append_and_log


def read_arrivals(path: Path) -> list[Arrival]:
    """Read a log; a last line that is not complete yet is left out."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [Arrival(*json.loads(line)) for line in lines]


def measure_delays(
    logs: Mapping[str, Iterable[Arrival]], since: float, until: float
) -> list[float]:
    """Return how long updates took from their author's ledger to each other machine's.

    Args:
        logs: Machine's key → its log. Only updates by these machines count.
        since: Only updates published at this time or later count, in seconds since 1970.
        until: Only updates published before this time count.

    Returns:
        Seconds, one value for each update and machine that received it.
    """
    arrivals = {key: {(a.author, a.seq): a for a in log} for key, log in logs.items()}
    return [
        arrivals[other][update].at - published.at
        for key, log in arrivals.items()
        for update, published in log.items()
        if published.key == key and since <= published.at < until
        for other in arrivals
        if other != key and update in arrivals[other]
    ]


def count_missing(logs: Mapping[str, Iterable[Arrival]], since: float, until: float) -> int:
    """Return how many updates of these machines, published in that time, another one lacks."""
    arrivals = {key: {(a.author, a.seq): a for a in log} for key, log in logs.items()}
    return sum(
        any(update not in arrivals[other] for other in arrivals)
        for key, log in arrivals.items()
        for update, published in log.items()
        if published.key == key and since <= published.at < until
    )
