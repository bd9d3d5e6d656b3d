"""Test the conditions that an owner is alerted of."""

import time
from datetime import timedelta

import pytest
from django.utils import timezone

from barnraise.protocol import reports
from coordinator.fleet.models import Membership
from coordinator.notify.alerts import choose_rising_curve, detect_alerts, has_risen
from coordinator.notify.notification_types import NotificationDraft
from coordinator.runs.models import Run
from coordinator.telemetry.models import LossPoint, Rollup
from coordinator.telemetry.rollup import drain_queue

pytestmark = pytest.mark.django_db


def detect() -> dict[str, NotificationDraft]:
    return {draft.kind.value: draft for draft in detect_alerts(timezone.now())}


@pytest.mark.parametrize(
    ("losses", "risen"),
    [
        ([3.0, 3.1, 3.2, 3.3], True),
        ([9.0, 3.0, 3.1, 3.2, 3.3], True),
        ([3.1, 3.2, 3.3], False),
        ([3.0, 3.1, 3.1, 3.3], False),
        ([], False),
    ],
)
def test_has_risen_needs_three_rises_in_a_row(losses, risen):
    assert has_risen(losses) is risen


def test_rising_validation_loss_alerts_the_owner_once(adas_run, numbered_report):
    run, ada = adas_run
    for seq, loss in enumerate((4.0, 3.0, 3.1, 3.2), 1):
        point = reports.MeasuredLoss(kind="validation", tokens=1000 * seq, loss=loss)
        ada.report(run, numbered_report(seq, points=[point]))
    drain_queue()
    assert detect() == {}
    point = reports.MeasuredLoss(kind="validation", tokens=5_000, loss=3.3)
    ada.store_reports(run, numbered_report(5, points=[point]))
    draft = detect()["run.rising"]
    assert draft.person == run.owner and "from 3.000 to 3.300" in draft.text
    assert detect()["run.rising"].key == draft.key
    assert LossPoint.objects.count() == 5


FALLING = [(1000 * place, 4.0 - place / 10) for place in range(1, 6)]
RISING = [(1000 * place, 4.0 + place / 10) for place in range(1, 6)]


@pytest.mark.parametrize(
    ("curves", "curve"),
    [
        ({"bob": RISING, "carl": FALLING, "dora": FALLING}, None),
        ({"bob": RISING, "carl": FALLING}, None),
        ({"bob": RISING, "carl": RISING, "dora": FALLING}, RISING),
        ({"bob": RISING, "carl": RISING, "ada": FALLING}, None),
        ({"bob": FALLING, "carl": FALLING, "ada": RISING}, RISING),
        ({"bob": RISING, "carl": RISING[:3]}, RISING),
        ({}, None),
    ],
)
def test_rise_that_one_person_reports_alerts_nobody(curves, curve):
    """Ada owns the run; whose curve is too short reports none."""
    assert choose_rising_curve(curves, "ada") == curve


def test_liar_with_most_tokens_neither_causes_nor_hides_an_alert(shared_run, numbered_report):
    run, ada, bob = shared_run

    def report_curve(machine, curve, **fields) -> None:
        points = [
            reports.MeasuredLoss(kind="validation", tokens=tokens, loss=loss)
            for tokens, loss in curve
        ]
        machine.store_reports(run, numbered_report(1, points=points, **fields))

    report_curve(bob, RISING, ledger_tokens=90_000)
    assert "run.rising" in detect(), "nobody else reports yet"
    report_curve(ada, FALLING, ledger_tokens=5_000)
    assert "run.rising" not in detect()


def test_machine_with_implausible_tokens_hides_no_rising_loss(shared_run, numbered_report):
    run, ada, bob = shared_run
    points = [
        reports.MeasuredLoss(kind="validation", tokens=1000 * place, loss=2.0 + place)
        for place in (1, 2, 3, 4)
    ]
    ada.report(run, numbered_report(1, points=points))
    bob.store_reports(run, numbered_report(1, ledger_tokens=1 << 62))
    assert "from 3.000 to 6.000" in detect()["run.rising"].text


def test_spent_budget_alerts_the_owner_and_again_after_an_extension(adas_run):
    run, _ = adas_run
    run.record_ledger_tokens(89_000)
    assert detect() == {}
    run.record_ledger_tokens(90_000)
    draft = detect()["run.budget"]
    assert draft.title == "A run has spent 90 % of its budget"
    run.extend(100_000)
    assert detect() == {}
    run.record_ledger_tokens(190_000)
    assert detect()["run.budget"].key != draft.key


def test_steps_without_a_finite_loss_alert_the_owner(person, adas_run, volunteer, numbered_report):
    run, _ = adas_run
    bob = volunteer(person("bob@example.org", name="Bob"), 2)
    bob.join(run)
    bob.store_reports(run, numbered_report(1, abandoned_steps=7))
    draft = detect()["run.diverged"]
    assert draft.person == run.owner and "pc-2 of Bob has dropped 7 steps" in draft.text


def test_machine_at_half_its_usual_speed_alerts_its_owner(adas_run, numbered_report):
    run, ada = adas_run
    ada.store_reports(run, numbered_report(1))
    Rollup.objects.all().delete()
    member = Membership.objects.get(run=run)
    now = time.time()

    def add_rollup(width: int, seconds_ago: float, rate: float) -> None:
        bucket = int(now - seconds_ago) // width * width
        Rollup.objects.create(
            membership=member, width=width, bucket=bucket, reports=10, rate_sum=10 * rate
        )

    for hour in (2, 3):
        add_rollup(3600, 3600 * hour, 1000.0)
    add_rollup(60, 120, 450.0)
    assert detect() == {}, "two hours do not make a usual speed"
    add_rollup(3600, 3600 * 4, 1000.0)
    draft = detect()["machine.slow"]
    assert draft.person == ada.machine.owner and "450 tokens/s" in draft.text
    Rollup.objects.filter(width=60).update(rate_sum=10 * 600.0)
    assert detect() == {}


def test_runs_that_do_not_train_alert_nobody(adas_run):
    run, _ = adas_run
    run.record_ledger_tokens(95_000)
    Membership.objects.update(last_seen=timezone.now() - timedelta(minutes=6))
    assert detect() == {}
    Membership.objects.update(last_seen=timezone.now())
    Run.objects.update(status="paused")
    assert detect() == {}
