"""The figures in a machine's reports and its status file."""

import time
from types import SimpleNamespace

import pytest
from helpers import paths
from memory_anchor import MemoryAnchor

from barnraise.exchange.stats import NeighbourView
from barnraise.protocol.coordinator_messages import Reports
from barnraise.protocol.enums import Activity
from barnraise.spec import preset
from barnraise.training.local_status import LocalStatus
from barnraise.training.metrics import TrainingMetrics

GOLDEN = paths.GOLDEN / "reports.json"
PLAN = Reports.model_validate_json(GOLDEN.read_text()).reports[0].plan


ANCHOR = SimpleNamespace(
    fragments=(), heads={}, retracted={}, vector={}, tokens=0, vector_digest=lambda: "0" * 64
)


def exchange_stats(neighbours=()) -> SimpleNamespace:
    """Return the figures of an exchange that has sent nothing."""
    return SimpleNamespace(
        peers=len(neighbours), bytes_sent=0, bytes_received=0, summary=None, neighbours=neighbours
    )


def metrics_after(*seconds: float) -> TrainingMetrics:
    metrics = TrainingMetrics("a" * 64)
    for step in seconds:
        metrics.record_step(
            SimpleNamespace(loss=4.0, tokens=1000, seconds=step, norm=2.0, abandoned=False), 0
        )
    return metrics


def test_status_of_a_resting_worker_is_written_less_often(monkeypatch):
    resting, training = TrainingMetrics("a" * 64), TrainingMetrics("a" * 64)
    resting.is_resting = True
    started = time.monotonic()
    for seconds, is_due in ((0.0, (False, False)), (2.0, (True, False)), (6.0, (True, True))):
        monkeypatch.setattr(time, "monotonic", lambda seconds=seconds: started + seconds)
        assert (training.is_status_due(), resting.is_status_due()) == is_due


def test_status_is_due_as_soon_as_the_activity_changes():
    metrics = TrainingMetrics("a" * 64)
    metrics.set_training()
    assert metrics.is_status_due()
    metrics.compose_report(ANCHOR, exchange_stats(), "0" * 16, ())
    metrics.set_training()
    assert not metrics.is_status_due()
    metrics.set_idle(Activity.PAUSED)
    assert metrics.is_status_due()


def test_step_seconds_is_a_mean_in_which_a_slow_start_fades():
    assert metrics_after().step_seconds is None
    assert metrics_after(9.0).step_seconds == 9.0
    assert metrics_after(9.0, *[1.0] * 19).step_seconds == pytest.approx(1 + 8 / 20)
    assert metrics_after(9.0, *[1.0] * 79).step_seconds == pytest.approx(1.0, abs=0.02)
    after_a_change = metrics_after(*[1.0] * 50, *[2.0] * 20).step_seconds
    assert 1.5 < after_a_change < 1.8, "it averages about twenty steps"


def test_abandoned_step_measures_nothing():
    metrics = metrics_after(1.0)
    metrics.record_step(
        SimpleNamespace(loss=float("nan"), tokens=1000, seconds=99.0, abandoned=True), 0
    )
    assert metrics.step_seconds == 1.0


def test_status_file_contains_the_plan_and_the_measured_step():
    metrics = metrics_after(5.0)
    bare = metrics.compose_report(ANCHOR, exchange_stats(), "0" * 16, ())
    assert bare.plan is None and bare.step_seconds == 5.0
    metrics.plan = PLAN
    report = metrics.compose_report(ANCHOR, exchange_stats(), "0" * 16, ())
    status = LocalStatus(**dict(report) | metrics.status_fields())
    assert (status.plan, status.step_seconds, status.loss) == (PLAN, 5.0, 4.0)


def test_checkpoint_is_in_all_later_reports_and_equal_on_two_machines():
    model = preset("gpt-nano", 256)
    one, other = MemoryAnchor.from_seed(model, 7), MemoryAnchor.from_seed(model, 7)
    checkpoints = []
    for anchor in (one, other):
        metrics = metrics_after(5.0)
        assert metrics.compose_report(anchor, exchange_stats(), "0" * 16, ()).checkpoint is None
        metrics.record_checkpoint(anchor, 4 * sum(len(fragment) for fragment in anchor.fragments))
        figures = metrics.compose_report(anchor, exchange_stats(), "0" * 16, ())
        assert (figures.checkpoint.vector, figures.checkpoint.digest) == (
            figures.vector,
            figures.anchor,
        )
        checkpoints.append(figures.checkpoint)
    assert checkpoints[0] == checkpoints[1] and checkpoints[0].digest == one.digest()
    other.expected_sketches = None  # the sketches are now computed from the weights
    assert other.checksum() == checkpoints[0].checksum
    other.fragments[1][5] += 1
    assert other.checksum() != checkpoints[0].checksum


def test_figures_contain_gradient_norm_learning_rate_and_busiest_links():
    metrics = TrainingMetrics("a" * 64)
    for norm in (4.0, 2.0):
        stats = SimpleNamespace(loss=4.0, tokens=1000, seconds=1.0, norm=norm, abandoned=False)
        metrics.record_step(stats, 1000, 6e-4)
    peers = [
        NeighbourView(key=f"{n:064x}"[::-1], lag=0, up=float(n), down=0.0, agrees=None)
        for n in range(20)
    ]
    figures = metrics.compose_report(ANCHOR, exchange_stats(peers), "0" * 16, ())
    assert figures.learning_rate == 6e-4
    assert figures.gradient_norm == pytest.approx(0.95 * 4 + 0.05 * 2)
    assert [link.sent_rate for link in figures.links] == [19, 18, 17, 16, 15, 14, 13, 12]
    assert figures.links[0].peer == peers[19].key[:16]


def test_training_loss_stands_at_the_tokens_of_its_step_before_any_update():
    metrics = TrainingMetrics("a" * 64)
    stats = SimpleNamespace(loss=5.0, tokens=4096, seconds=1.0, norm=1.0, abandoned=False)
    metrics.record_step(stats, 4096)
    metrics.set_idle(Activity.PAUSED)
    [point] = metrics.compose_report(ANCHOR, exchange_stats(), "0" * 16, ()).points
    assert (point.tokens, point.loss) == (4096, 5.0)
