"""The hours of a week in which a machine may train, in its local time. Pure.

`mon-fri 19:00-07:00, sat-sun` is from Monday to Friday each evening until the next morning, and
whole weekends. Wall-clock time decides, so that a rule means the same before and after clocks
change: an hour that clocks skip does not come, and one that they repeat counts twice.
"""

import re
from dataclasses import dataclass
from datetime import datetime

from barnraise.errors import StateError

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_MINUTES = 24 * 60
WEEK_MINUTES = 7 * DAY_MINUTES
EXAMPLE = '"mon-fri 19:00-07:00, sat-sun"'
_ENTRY = re.compile(
    r"(?:(?P<first>[a-z]+)(?:-(?P<last>[a-z]+))?)?\s*(?:(?P<start>\d+:\d+)-(?P<end>\d+:\d+))?"
)


@dataclass(frozen=True)
class DailySpan:
    """The same hours on some days.

    Attributes:
        days: those on which it begins; 0 is Monday.
        start: minutes from midnight.
        end: minutes from midnight; on the next day where it is not after `start`.
    """

    days: frozenset[int]
    start: int
    end: int

    def contains(self, day: int, minute: int) -> bool:
        """Return whether the span covers a minute of a day, counted from midnight."""
        if self.start < self.end:
            return day in self.days and self.start <= minute < self.end
        is_evening = day in self.days and minute >= self.start
        return is_evening or ((day - 1) % 7 in self.days and minute < self.end)


@dataclass(frozen=True)
class WeeklyHours:
    """Spans of a week, which may overlap. Without any, no minute is covered."""

    spans: tuple[DailySpan, ...]

    def contains(self, moment: datetime) -> bool:
        """Return whether a moment is within the hours, by the time of its own zone."""
        minute = 60 * moment.hour + moment.minute
        return any(span.contains(moment.weekday(), minute) for span in self.spans)

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


def parse_hours(text: str) -> WeeklyHours:
    """Read hours as people type them.

    Raises:
        StateError: the text says no hours; the message has an example.
    """
    entries = [part.strip() for part in text.lower().split(",")]
    return WeeklyHours(tuple(_parse_entry(entry) for entry in entries))


def _parse_entry(entry: str) -> DailySpan:
    match = _ENTRY.fullmatch(entry)
    if not entry or match is None:
        raise StateError(f"hours: '{entry}' is no time of a week; write it like {EXAMPLE}")
    first, last, start, end = match.group("first", "last", "start", "end")
    if first and not last and not start:
        raise StateError(
            f"hours: '{entry}' says no time of that day; write it like \"{first} 19:00-24:00\""
        )
    days = _parse_days(first, last) if first else frozenset(range(7))
    if not start:
        return DailySpan(days, 0, DAY_MINUTES)
    begins, ends = _parse_time(start), _parse_time(end)
    if begins in (ends, DAY_MINUTES):
        raise StateError(
            f"hours: {start}-{end} is no time at all; a whole day is 00:00-24:00, and a night is "
            "like 19:00-07:00"
        )
    return DailySpan(days, begins, ends)


def _parse_days(first: str, last: str | None) -> frozenset[int]:
    numbers: list[int] = []
    for name in (first, last or first):
        if name[:3] not in DAYS:
            raise StateError(f"hours: '{name}' is no day of the week; write it like {EXAMPLE}")
        numbers.append(DAYS.index(name[:3]))
    count = (numbers[1] - numbers[0]) % 7 + 1
    return frozenset((numbers[0] + number) % 7 for number in range(count))


def _parse_time(text: str) -> int:
    hour, minute = (int(part) for part in text.split(":"))
    if minute > 59 or 60 * hour + minute > DAY_MINUTES:
        raise StateError(f"hours: there is no {text}; write it like 19:00-07:00")
    return 60 * hour + minute
