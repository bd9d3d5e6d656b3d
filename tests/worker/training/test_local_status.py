"""Test the status file: what a worker writes, and what newer versions read of older files."""

import json

import pytest

from barnraise.protocol.reports import NO_FIGURES, MachineFigures, Report
from barnraise.training.local_status import STATUS_FILE, LocalStatus, read_status

# What an earlier version wrote, shortened: other names, and none of the later fields.
OLDER = {
    "at": 1_795_848_887.0,
    "run": "01890000-0000-7000-8000-000000000001",
    "name": "Ridge",
    "activity": "training",
    "step": 7,
    "loss": 2.5,
    "rate": 100.0,
    "peer_bytes": 17,
    "peers": 2,
    "validation_last": [3_000_000, 2.71],
    "neighbours": [{"key": "a" * 64, "lag": 0, "up": 5.0, "down": 1.0, "agrees": None}],
}


def test_status_has_every_figure_of_a_report(tmp_path):
    figures = dict(NO_FIGURES) | {"step": 7, "gradient_norm": 0.5}
    report = Report(seq=1, at=5.0, addresses=["127.0.0.1:1"], **figures)
    status = LocalStatus(**dict(report) | {"name": "Ridge"})
    (tmp_path / STATUS_FILE).write_text(json.dumps(status.model_dump(mode="json")))
    assert read_status(tmp_path) == status
    assert {name: getattr(status, name) for name in MachineFigures.model_fields} == figures


def test_status_of_an_older_version_is_read_with_what_it_has(tmp_path):
    (tmp_path / STATUS_FILE).write_text(json.dumps(OLDER))
    status = read_status(tmp_path)
    assert status is not None
    assert (status.name, status.step, status.peers) == ("Ridge", 7, 2)
    assert status.validation_last == (3_000_000, 2.71) and status.neighbours[0].up == 5.0
    assert status.tokens == 0 and status.exchange is None and status.warning == ""


@pytest.mark.parametrize("content", [b"", b'{"name":', b"[]", b"\xff", b'{"activity": "flying"}'])
def test_damaged_status_file_is_no_status(tmp_path, content):
    (tmp_path / STATUS_FILE).write_bytes(content)
    assert read_status(tmp_path) is None
    assert read_status(tmp_path / "absent") is None
