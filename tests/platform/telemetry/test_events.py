"""Test the events of a run and the activity feed on its page."""

import re
from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone
from helpers.site.checkpoint_views import build_checkpoint

from barnraise.protocol import reports
from barnraise.protocol.enums import Activity, PauseReason, RunStatus
from coordinator.live.activity_feed import MAX_PER_SOURCE, collect_activity
from coordinator.live.run_snapshot import RunSnapshot, build_delta
from coordinator.telemetry import events, run_table
from coordinator.telemetry.events import RunEvent, event_kind_of_change
from coordinator.telemetry.rollup import drain_queue

pytestmark = pytest.mark.django_db

KINDS = RunEvent.Kind


def list_sentences(run) -> list[str]:
    """Return the activity feed as sentences, newest first."""
    return [
        f"{event['who']} {event['what']}"
        for event in collect_activity(run, run_table.machine_rows(run)).events
    ]


@pytest.mark.parametrize(
    "before, after, run, kind",
    [
        ("joining", "training", RunStatus.TRAINING, KINDS.JOINED),
        ("preparing", "paused", RunStatus.PAUSED, KINDS.JOINED),
        ("left", "finishing", RunStatus.TRAINING, KINDS.JOINED),
        ("training", "paused", RunStatus.TRAINING, KINDS.PAUSED),
        (
            "training",
            "paused",
            RunStatus.PAUSED,
            None,
        ),  # the run's own event covers all its machines
        ("paused", "training", RunStatus.TRAINING, KINDS.RESUMED),
        ("training", "left", RunStatus.TRAINING, KINDS.LEFT),
        ("finishing", "finished", RunStatus.FINISHED, KINDS.FINISHED),
        ("training", "finishing", RunStatus.TRAINING, None),
        ("training", "training", RunStatus.TRAINING, None),
        ("left", "joining", RunStatus.TRAINING, None),
    ],
)
def test_change_of_activity_maps_to_an_event_kind(before, after, run, kind):
    assert event_kind_of_change(before, after, run) == kind


@pytest.mark.parametrize(
    ("reason", "kind", "text"),
    [
        (PauseReason.HERE, KINDS.PAUSED, "pc-1 paused on the machine itself"),
        (PauseReason.BATTERY, KINDS.PAUSED, "pc-1 paused: on battery"),
        (PauseReason.HOURS, KINDS.PAUSED, "pc-1 paused by its hours"),
        (PauseReason.RUN, None, ""),
    ],
)
def test_event_of_a_pause_says_why(adas_run, numbered_report, reason, kind, text):
    run, volunteer = adas_run
    volunteer.store_reports(run, numbered_report(1))
    pause = reports.PauseView(reason=reason)
    # The site's view of the run may be newer than what the machine obeyed when it reported.
    report = numbered_report(2, activity=Activity.PAUSED, pause=pause)
    volunteer.store_reports(run, report)
    events_of_run = [event.kind for event in run.events.order_by("at", "id")]
    assert events_of_run == ["joined", *([kind] if kind else [])]
    assert (text in list_sentences(run)) == bool(text)
    assert not [sentence for sentence in list_sentences(run) if "by its owner" in sentence]
    (row,) = run_table.machine_rows(run)
    assert row["pause"] == {"reason": reason.value, "until": None}


def test_join_pause_resume_and_leave_are_one_event_each(adas_run, numbered_report):
    run, volunteer = adas_run
    kinds = ("training", "training", "paused", "training", "left")
    for seq, activity in enumerate(kinds, 1):
        volunteer.store_reports(run, numbered_report(seq, activity=Activity(activity)))
    volunteer.store_reports(run, numbered_report(2))  # a late repetition
    assert list(run.events.order_by("at", "id").values_list("kind", flat=True)) == [
        "joined",
        "paused",
        "resumed",
        "left",
    ]


def test_machine_that_states_another_activity_in_each_report_fills_no_feed(
    adas_run, numbered_report, monkeypatch
):
    monkeypatch.setattr(events, "MAX_OF_MACHINE", 3)
    run, volunteer = adas_run
    for seq in range(1, 11):
        activity = Activity.LEFT if seq % 2 else Activity.TRAINING
        volunteer.report(run, numbered_report(seq, activity=activity))
        if seq % 4 == 0:
            drain_queue(wait=True)
    drain_queue(wait=True)
    assert run.events.count() == 3


def test_pause_of_a_run_is_one_event_for_all_machines(adas_run, numbered_report):
    run, volunteer = adas_run
    volunteer.store_reports(run, numbered_report(1))
    run.pause(actor=run.owner)
    volunteer.store_reports(run, numbered_report(2, activity=Activity.PAUSED))
    run.resume(actor=run.owner)
    volunteer.store_reports(run, numbered_report(3))
    assert [event.kind for event in run.events.all()] == ["joined"]
    sentences = " / ".join(list_sentences(run))
    assert "paused the run" in sentences
    assert "resumed the run" in sentences
    assert "pc-1 joined" in sentences


def test_feed_lists_run_checkpoint_and_machine_events_newest_first(
    person, adas_run, numbered_report
):
    run, volunteer = adas_run
    volunteer.store_reports(run, numbered_report(1, checkpoint=build_checkpoint(tokens=900)))
    run.extend(5000, actor=person("staff@example.org", is_staff=True, name="Sam"))
    volunteer.machine.revoke(reason="lost")
    feed = collect_activity(run, run_table.machine_rows(run)).events
    assert [event["at"] for event in feed] == sorted((event["at"] for event in feed), reverse=True)
    sentences = list_sentences(run)
    assert f"Checkpoint at 900 tokens, {'c' * 12}" in sentences
    assert "The site added 5,000 tokens to the budget" in sentences, (
        "the feed names a member of the staff"
    )
    assert "pc-1 was revoked" in sentences
    assert "pc-1 prepared the text" in sentences
    assert "The site started the training" in sentences
    assert sentences[-1] == f"{run.owner.shown_name} created the run"


def test_silent_machine_is_in_the_feed_while_it_is_silent(adas_run, numbered_report, valkey):
    run, volunteer = adas_run
    volunteer.store_reports(run, numbered_report(1))
    rows = run_table.machine_rows(run)
    assert not [
        event
        for event in collect_activity(run, rows).events
        if "stopped reporting" in event["what"]
    ]
    later = run_table.machine_rows(run, now=rows[0]["last_seen"] + 60)
    (silent,) = [
        event
        for event in collect_activity(run, later).events
        if "stopped reporting" in event["what"]
    ]
    assert silent["who"] == "pc-1" and silent["at"] == pytest.approx(rows[0]["last_seen"], abs=0.1)


def test_events_beyond_the_newest_are_counted_and_paged(adas_run, valkey):
    run, volunteer = adas_run
    start = timezone.now() - timedelta(hours=2)
    RunEvent.objects.bulk_create(
        RunEvent(
            run=run,
            machine=volunteer.machine,
            kind=KINDS.PAUSED if n % 2 else KINDS.RESUMED,
            at=start + timedelta(seconds=n // 2),
        )
        for n in range(250)
    )
    activity = collect_activity(run, [])
    others = activity.total - 250
    assert len(activity.events) == MAX_PER_SOURCE + others and others > 0

    address, found = f"/runs/{run.slug}/events/", []
    while address:
        page = Client().get(address).content.decode()
        found += re.findall(r'<time datetime="([^"]+)"', page)
        link = re.search(r'rel="next" href="([^"]+)"', page)
        address = link and f"/runs/{run.slug}/events/{link[1]}"
    assert len(found) == activity.total and found == sorted(found, reverse=True)
    assert Client().get(f"/runs/{run.slug}/events/?before=soon").status_code == 200


def test_delta_contains_only_new_events(adas_run, numbered_report, valkey):
    run, volunteer = adas_run
    before = RunSnapshot.capture(run)
    assert not build_delta(before, RunSnapshot.capture(run), []).get("events")
    volunteer.store_reports(run, numbered_report(1))
    valkey.flushdb()  # the feed is cached for two seconds
    (event,) = build_delta(before, RunSnapshot.capture(run), [])["events"]
    assert event["what"] == "joined" and event["kind"] == "machine"


def test_names_in_events_are_escaped_on_the_page(person, launched_run, numbered_report):
    owner = person(name="<script>alert(1)</script>")
    run, volunteer = launched_run(owner, name="Dawn")
    volunteer.machine.rename('<img src=x onerror="alert(1)">', actor=owner)
    volunteer.store_reports(run, numbered_report(1))
    page = Client().get(f"/runs/{run.slug}/").content.decode()
    assert "&lt;img src=x" in page and "<img src=x" not in page
    assert "&lt;script&gt;" in page and "<script>alert" not in page


def test_machine_curves_are_served_most_tokens_first(adas_run, numbered_report, volunteer):
    run, first = adas_run
    second = volunteer(run.owner, 2)
    second.join(run)
    points = [
        reports.MeasuredLoss(kind="train", tokens=n * 100, loss=5.0 - n / 100) for n in range(1, 5)
    ]
    first.report(run, numbered_report(1, points=points, tokens=4000))
    second.store_reports(run, numbered_report(1, points=points[:2], tokens=2000))
    machines = Client().get(f"/live/{run.pk}/machines/").json()["machines"]
    assert [machine["name"] for machine in machines] == ["pc-1", "pc-2"], (
        "machines are not sorted by tokens"
    )
    assert machines[0]["points"] == [[100, 4.99], [200, 4.98], [300, 4.97], [400, 4.96]]
    assert len(machines[1]["points"]) == 2
