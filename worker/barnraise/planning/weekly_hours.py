"""The hours of a week in which a machine may train, in its local time. Pure.

`mon-fri 19:00-07:00, sat-sun` is from Monday to Friday each evening until the next morning, and
whole weekends. Wall-clock time decides, so that a rule means the same before and after clocks
change: an hour that clocks skip does not come, and one that they repeat counts twice.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from itertools import chain

from barnraise.errors import StateError

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_MINUTES = 24 * 60
WEEK_MINUTES = 7 * DAY_MINUTES
EXAMPLE = '"mon-fri 19:00-07:00, sat-sun"'
_ENTRY = re.compile(
    r"(?:(?P<first>[a-z]+)(?:-(?P<last>[a-z]+))?)?\s*(?:(?P<start>\d+:\d+)-(?P<end>\d+:\d+))?"
)


@dataclass(frozen=True)
class WeeklyHours:
    """The covered minutes of a week, counted from the beginning of Monday."""

    minutes: frozenset[int]

    def contains(self, moment: datetime) -> bool:
        """Return whether a moment is within the hours, by the time of its own zone."""
        minute = DAY_MINUTES * moment.weekday() + 60 * moment.hour + moment.minute
        return minute in self.minutes

    def next_change(self, now: datetime) -> datetime | None:
        """Return the first full minute after `now` at which `contains` is another one.

        It looks at every minute of a week and a day: zones change their offsets, and no shortcut
        holds for all of them.

        Returns:
            A moment in the zone of `now`, or the machine's if it has none; None where the whole
            week is alike.
        """
        before = self.contains(now)
        # Arithmetic within a zone ignores its changes, so the minutes are counted in UTC.
        first = now.timestamp() // 60
        for minutes in range(1, WEEK_MINUTES + DAY_MINUTES + 1):
            moment = datetime.fromtimestamp(60 * (first + minutes), now.tzinfo)
            if self.contains(moment) != before:
                return moment
        return None


@lru_cache(maxsize=8)
def parse_hours(text: str) -> WeeklyHours:
    """Read hours as people type them.

    Raises:
        StateError: the text says no hours; the message has an example.
    """
    entries = [part.strip() for part in text.lower().split(",")]
    return WeeklyHours(frozenset(chain.from_iterable(map(_parse_entry, entries))))


def _parse_entry(entry: str) -> Iterator[int]:
    """Yield the minutes of a week that an entry covers; hours may end on the next day."""
    match = _ENTRY.fullmatch(entry)
    if not entry or match is None:
        raise StateError(f"hours: '{entry}' is no time of a week; write it like {EXAMPLE}")
    first, last, start, end = match.group("first", "last", "start", "end")
    if first and not last and not start:
        raise StateError(
            f"hours: '{entry}' says no time of that day; write it like \"{first} 19:00-24:00\""
        )
    days = _parse_days(first, last) if first else range(7)
    begins, ends = _parse_time(start or "0:00"), _parse_time(end or "24:00")
    if begins in (ends, DAY_MINUTES):
        raise StateError(
            f"hours: {start}-{end} is no time at all; a whole day is 00:00-24:00, and a night is "
            "like 19:00-07:00"
        )
    length = ends - begins if begins < ends else ends - begins + DAY_MINUTES
    for day in days:
        first_minute = DAY_MINUTES * day + begins
        yield from ((first_minute + minute) % WEEK_MINUTES for minute in range(length))


def _parse_days(first: str, last: str | None) -> range:
    numbers: list[int] = []
    for name in (first, last or first):
        if name[:3] not in DAYS:
            raise StateError(f"hours: '{name}' is no day of the week; write it like {EXAMPLE}")
        numbers.append(DAYS.index(name[:3]))
    return range(numbers[0], numbers[0] + (numbers[1] - numbers[0]) % 7 + 1)


def _parse_time(text: str) -> int:
    hour, minute = (int(part) for part in text.split(":"))
    if minute > 59 or 60 * hour + minute > DAY_MINUTES:
        raise StateError(f"hours: there is no {text}; write it like 19:00-07:00")
    return 60 * hour + minute
