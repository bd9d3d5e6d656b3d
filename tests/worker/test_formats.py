"""Test how sizes, rates and durations are written for people."""

import pytest

from barnraise import formats


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (850, "850 parameters"),
        (12_345, "12.3 K parameters"),
        (1_071_872, "1.1 M parameters"),
        (124_439_808, "124.4 M parameters"),
        (1_557_611_200, "1.56 B parameters"),
        (174_604_259_328, "174.60 B parameters"),
    ],
)
def test_number_of_parameters_has_the_unit_of_its_size(count, text):
    assert formats.format_parameters(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 kB"),
        (3_000, "3 kB"),
        (1_500_000, "1.5 MB"),
        (24 * 10**9, "24 GB"),
        (1.2e12, "1.2 TB"),
    ],
)
def test_bytes_have_the_unit_of_their_size(count, text):
    assert formats.format_bytes(count) == text
    assert formats.format_byte_rate(count) == f"{text}/s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0031, "3.1 ms"), (12.0, "12.0 s"), (900.0, "15 min"), (45_000.0, "12.5 h")],
)
def test_duration_has_the_unit_of_its_length(seconds, text):
    assert formats.format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (40.4, "40 s"),
        (2_100, "35 min"),
        (19_200, "5 h 20 min"),
        (47 * 3600, "47 h 00 min"),
        (2.6 * 86_400, "3 days"),
        (1_500 * 86_400, "1,500 days"),
    ],
)
def test_duration_has_the_unit_in_which_people_wait(seconds, text):
    assert formats.format_duration(seconds) == text
