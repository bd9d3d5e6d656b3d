"""Test the hours of a week: every minute is in or out, across midnight and when clocks change."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.errors import StateError
from barnraise.planning.weekly_hours import DAYS, WEEK_MINUTES, parse_hours

BERLIN = ZoneInfo("Europe/Berlin")
MONDAY = datetime(2026, 11, 23, tzinfo=UTC)  # a week without a change of clocks
minutes_of_day = st.integers(0, 24 * 60 - 1)


@st.composite
def entries(draw: st.DrawFn) -> tuple[str, set[int]]:
    """Draw an entry, and the minutes of a week that it must cover, counted one by one."""
    first, count = draw(st.integers(0, 6)), draw(st.integers(1, 7))
    start = draw(minutes_of_day)
    length = draw(st.integers(1, 24 * 60 - 1))
    end = (start + length) % (24 * 60)
    last = (first + count - 1) % 7
    days = DAYS[first] if count == 1 else f"{DAYS[first]}-{DAYS[last]}"
    text = f"{days} {start // 60:02}:{start % 60:02}-{end // 60:02}:{end % 60:02}"
    covered = {
        ((first + day) % 7 * 24 * 60 + start + minute) % WEEK_MINUTES
        for day in range(count)
        for minute in range(length)
    }
    return text, covered


@settings(max_examples=60, deadline=None)
@given(st.lists(entries(), min_size=1, max_size=3))
def test_every_minute_of_a_week_is_either_in_or_out(drawn):
    hours = parse_hours(", ".join(text for text, _ in drawn))
    covered = set().union(*(minutes for _, minutes in drawn))
    found = {
        minute
        for minute in range(WEEK_MINUTES)
        if hours.contains(MONDAY + timedelta(minutes=minute))
    }
    assert found == covered


@settings(max_examples=60, deadline=None)
@given(
    st.lists(entries(), min_size=1, max_size=2),
    st.datetimes(datetime(2026, 1, 1), datetime(2026, 12, 31)),
)
def test_next_change_is_the_first_minute_that_differs(drawn, naive):
    hours = parse_hours(", ".join(text for text, _ in drawn))
    now = naive.replace(tzinfo=UTC).astimezone(BERLIN)
    change = hours.next_change(now)
    if change is None:
        assert all(
            hours.contains(MONDAY + timedelta(minutes=minute)) == hours.contains(now)
            for minute in range(WEEK_MINUTES)
        )
        return
    assert hours.contains(change) != hours.contains(now)
    before = change.astimezone(UTC) - timedelta(minutes=1)
    assert hours.contains(max(before, now.astimezone(UTC)).astimezone(BERLIN)) == hours.contains(
        now
    )


def at(text: str) -> datetime:
    """Return a moment, given in UTC, in Berlin's time."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC).astimezone(BERLIN)


def test_night_that_clocks_shorten_and_night_that_they_lengthen():
    hours = parse_hours("22:00-02:30")
    # 29 March: 01:59 is followed by 03:00, so that the night ends half an hour before its end.
    spring = hours.next_change(at("2026-03-28 22:00"))
    assert spring is not None and spring.astimezone(UTC) == datetime(2026, 3, 29, 1, 0, tzinfo=UTC)
    # 25 October: 02:00 to 02:59 come twice. The night ends, and comes back for its last half hour.
    first_end = hours.next_change(at("2026-10-24 22:00"))
    assert first_end is not None
    assert first_end.astimezone(UTC) == datetime(2026, 10, 25, 0, 30, tzinfo=UTC)
    again = hours.next_change(first_end)
    assert again is not None and again.astimezone(UTC) == datetime(2026, 10, 25, 1, 0, tzinfo=UTC)


def test_hours_that_clocks_skip_do_not_come():
    hours = parse_hours("sun 02:10-02:50")
    opening = hours.next_change(at("2026-03-28 12:00"))
    assert opening is not None and opening.isoformat() == "2026-04-05T02:10:00+02:00"


def test_examples_of_the_documentation():
    hours = parse_hours("mon-fri 19:00-07:00, sat-sun")
    assert not hours.contains(datetime(2026, 11, 27, 18, 59))
    assert hours.contains(datetime(2026, 11, 27, 19, 0))
    assert hours.contains(datetime(2026, 11, 28, 12, 0))  # Saturday
    assert not hours.contains(datetime(2026, 11, 30, 6, 59))  # Sunday's night is over at midnight
    assert parse_hours("Saturday-Sunday, 1:00-2:00").contains(datetime(2026, 11, 25, 1, 30))
    assert parse_hours("fri-mon").contains(MONDAY)
    assert parse_hours("00:00-24:00").next_change(MONDAY) is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("25:00-26:00", "there is no 25:00; write it like 19:00-07:00"),
        ("fri", "'fri' says no time of that day; write it like \"fri 19:00-24:00\""),
        ("07:00-07:00", "is no time at all"),
        ("24:00-07:00", "is no time at all"),
        ("24:30-07:00", "there is no 24:30"),
        ("19:60-20:00", "there is no 19:60"),
        ("", "'' is no time of a week"),
        ("sat-sun,", "'' is no time of a week"),
        ("someday 19:00-20:00", "'someday' is no day of the week"),
        ("19-7", "'19-7' is no time of a week"),
    ],
)
def test_what_is_no_time_is_a_sentence_with_an_example(text, sentence):
    with pytest.raises(StateError, match=sentence):
        parse_hours(text)
