"""Test how sizes, rates and durations are written for people."""

import json
from pathlib import Path

import pytest

from barnraise import formats

# The frontend's unit tests read the same examples.
GOLDEN = Path(__file__).parents[1] / "contract" / "golden" / "formats.json"
WRITERS = {
    "bytes": formats.format_bytes,
    "byteRate": formats.format_byte_rate,
    "count": formats.format_count,
    "duration": formats.format_duration,
    "loss": formats.format_loss,
    "share": formats.format_share,
}


@pytest.mark.parametrize(("kind", "examples"), json.loads(GOLDEN.read_text()).items())
def test_terminals_and_pages_write_figures_alike(kind, examples):
    assert [WRITERS[kind](value) for value, _ in examples] == [text for _, text in examples]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0031, "3.1 ms"), (12.0, "12.0 s"), (900.0, "15 min"), (45_000.0, "12.5 h")],
)
def test_duration_has_the_unit_of_its_length(seconds, text):
    assert formats.format_seconds(seconds) == text


@pytest.mark.parametrize("text", ["1e9T", "1e17 GB", "1e18", "-1", "nan", "inf"])
def test_size_that_no_machine_has_is_refused(text):
    with pytest.raises(formats.StateError, match="is not a size a machine could have"):
        formats.parse_bytes(text)
