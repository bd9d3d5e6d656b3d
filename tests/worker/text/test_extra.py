"""A machine without the extra `barnraise[text]` gets one sentence for what it cannot read."""

import sys

import pytest

from barnraise.text.inspection import inspect_source
from barnraise.text.places import PathPlace
from barnraise.text.reading import open_source
from barnraise.text.shards import TextPlan


@pytest.mark.parametrize(
    ("module", "name", "content"),
    [
        ("datasets", "a.parquet", b"PAR1" + bytes(20)),
        ("zstandard", "a.txt.zst", b"\x28\xb5\x2f\xfd" + bytes(20)),
        ("charset_normalizer", "a.txt", "Grüße aus München\n".encode("latin-1") * 9),
    ],
)
def test_file_that_needs_the_extra_says_what_to_install(
    monkeypatch, tmp_path, module, name, content
):
    monkeypatch.setitem(sys.modules, module, None)
    path = tmp_path / name
    path.write_bytes(content)
    with open_source([PathPlace(path)]) as source:
        refusal = inspect_source(source, TextPlan()).refusal
    assert refusal.startswith(str(path)) and "pip install 'barnraise[text]'" in refusal
