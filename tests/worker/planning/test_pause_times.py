"""Test how long a pause lasts, as people type it."""

from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from barnraise.errors import StateError
from barnraise.planning.pause_times import find_pause_end

NOW = datetime(2026, 11, 25, 12, 0, tzinfo=ZoneInfo("Europe/Berlin"))


@pytest.mark.parametrize(
    ("duration", "until", "end"),
    [
        ("1h", "", NOW + timedelta(hours=1)),
        ("90m", "", NOW + timedelta(minutes=90)),
        ("1h 30m", "", NOW + timedelta(minutes=90)),
        ("0.5H", "", NOW + timedelta(minutes=30)),
        ("", "19:30", NOW.replace(hour=19, minute=30)),
        ("", "7:00", NOW.replace(day=26, hour=7)),
        ("", "2026-12-01 07:00", NOW.replace(month=12, day=1, hour=7)),
    ],
)
def test_end_of_a_pause(duration, until, end):
    assert find_pause_end(duration, until, NOW) == end.timestamp()


def test_pause_without_an_end():
    assert find_pause_end("", "", NOW) is None


@pytest.mark.parametrize(
    ("duration", "until", "sentence"),
    [
        ("0", "", "'0' is no duration of a pause; write it like --for 1h"),
        ("0h", "", "'0h' is no duration of a pause"),
        ("-1h", "", "'-1h' is no duration"),
        ("soon", "", "'soon' is no duration"),
        ("9999d", "", "a year at most"),
        ("9" * 400 + "d", "", "is no duration"),
        ("", "07:00+01:00", "is no time of a day"),
        ("", "yesterday", "'yesterday' is no time of a day; write it like --until 07:00"),
        ("", "25:00", "'25:00' is no time of a day"),
        ("", "2026-11-24 07:00", "'2026-11-24 07:00' is over"),
        ("", "2026-02-30 07:00", "is no time of a day"),
        ("1h", "07:00", "either a duration or an end: --for 1h, or --until 07:00"),
    ],
)
def test_what_is_no_pause_is_a_sentence_with_an_example(duration, until, sentence):
    with pytest.raises(StateError, match=sentence):
        find_pause_end(duration, until, NOW)
