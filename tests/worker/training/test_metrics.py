"""The figures in a machine's reports and its status file."""

from types import SimpleNamespace

import pytest
from helpers import paths

from barnraise.exchange.ledger.anchor import Anchor
from barnraise.protocol.coordinator_messages import Reports
from barnraise.protocol.reports import PlanView
from barnraise.spec import preset
from barnraise.training.metrics import TrainingMetrics

GOLDEN = paths.GOLDEN / "reports.json"
PLAN = Reports.model_validate_json(GOLDEN.read_text()).reports[0].plan


def progress_after(*seconds: float) -> TrainingMetrics:
    progress = TrainingMetrics("a" * 64)
    for step in seconds:
        progress.record_step(
            SimpleNamespace(loss=4.0, tokens=1000, seconds=step, abandoned=False), 0
        )
    return progress


def test_a_measured_step_is_the_engines_own_time_and_a_slow_first_one_fades():
    assert progress_after().step_seconds is None
    assert progress_after(9.0).step_seconds == 9.0
    assert progress_after(9.0, *[1.0] * 19).step_seconds == pytest.approx(1 + 8 / 20)
    assert progress_after(9.0, *[1.0] * 79).step_seconds == pytest.approx(1.0, abs=0.02)
    moved = progress_after(*[1.0] * 50, *[2.0] * 20).step_seconds
    assert 1.5 < moved < 1.8, "some twenty steps count"


def test_an_abandoned_step_measures_nothing():
    progress = progress_after(1.0)
    progress.record_step(
        SimpleNamespace(loss=float("nan"), tokens=1000, seconds=99.0, abandoned=True), 0
    )
    assert progress.step_seconds == 1.0


def test_the_status_file_tells_the_plan_and_what_it_came_to():
    anchor = SimpleNamespace(fragments=(), heads={}, holes={}, vector={}, tokens=0)
    links = SimpleNamespace(peers=0, bytes_sent=0, bytes_received=0, summary=None, neighbours=())
    progress = progress_after(5.0)
    bare = progress.status(progress.numbers(anchor, links, "0" * 16, ()))
    assert bare["plan"] is None and bare["step_seconds"] == 5.0
    progress.plan = PLAN
    numbers = progress.numbers(anchor, links, "0" * 16, ())
    assert (numbers.plan, numbers.step_seconds) == (PLAN, 5.0)
    assert PlanView.model_validate(progress.status(numbers)["plan"]) == PLAN


def test_a_checkpoint_is_told_in_every_report_from_then_on_as_two_machines_would_name_it():
    model = preset("gpt-nano", 256)
    one, other = Anchor.from_seed(model, 7), Anchor.from_seed(model, 7)
    links = SimpleNamespace(peers=0, bytes_sent=0, bytes_received=0, summary=None, neighbours=())
    told = []
    for anchor in (one, other):
        progress = progress_after(5.0)
        assert progress.numbers(anchor, links, "0" * 16, ()).checkpoint is None
        progress.record_checkpoint(anchor, 4 * sum(len(fragment) for fragment in anchor.fragments))
        numbers = progress.numbers(anchor, links, "0" * 16, ())
        assert (numbers.checkpoint.vector, numbers.checkpoint.digest) == (
            numbers.vector,
            numbers.anchor,
        )
        told.append(numbers.checkpoint)
    assert told[0] == told[1] and told[0].digest == one.digest()
    other.expected_sketches = (
        None  # its beginning is not known: the sketches are taken of the weights themselves
    )
    assert other.checksum() == told[0].checksum
    other.fragments[1][5] += 1
    assert other.checksum() != told[0].checksum
