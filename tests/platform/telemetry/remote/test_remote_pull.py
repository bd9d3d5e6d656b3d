"""Test telemetry pulled from other mirrors: what is refused, delayed or deleted later."""

import json
import time
from datetime import timedelta

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from helpers.mirrors.event_log_builder import LogBuilder
from helpers.mirrors.fake_mirror import FakeMirror
from helpers.mirrors.mirror_lists import signed_list
from helpers.site.remote_telemetry import OTHER, elsewhere, ingest_page, membership_row, page

from barnraise.protocol.mirror_list import Expulsion, MirrorEntry
from barnraise.protocol.signing import Identity, digest
from coordinator.fleet.models import Membership
from coordinator.lib import site_identity
from coordinator.replication import mirror_list
from coordinator.replication import pull as replication_pull
from coordinator.replication.models import PeerStatus
from coordinator.telemetry import history, report_queue
from coordinator.telemetry.models import LossPoint, RemoteCursor, RunEvent
from coordinator.telemetry.remote import export, ingest, protocol, pull
from coordinator.telemetry.rollup import drain_queue

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("valkey")]


@pytest.fixture
def log() -> LogBuilder:
    """Return a log with its first event only."""
    return LogBuilder()


def test_pull_waits_a_bounded_time_for_an_unknown_machine(training_run):
    run, ada, _ = training_run
    unknown = Identity(b"z" * 32)
    telemetry_page = page(
        (str(run.pk), unknown.key),
        elsewhere(run, ada),
        memberships=[membership_row(), membership_row(machine_index=1)],
        more=True,
        position=protocol.TelemetryPosition(memberships=(7, None)),
    )
    result = ingest_page(telemetry_page)
    assert (result.left_out, result.more) == ("", False)
    assert RemoteCursor.objects.get(key=OTHER).position == protocol.TelemetryPosition()
    assert Membership.everywhere.filter(mirror=OTHER).count() == 1, (
        "the known machine was not stored"
    )
    RemoteCursor.objects.update(waits=timezone.now() - ingest.EVENT_PATIENCE)
    result = ingest_page(telemetry_page)
    assert unknown.key[:8] in result.left_out and result.more
    assert RemoteCursor.objects.get(key=OTHER).position.memberships.changed == 7


def test_pulled_rows_with_impossible_times_are_left_out(training_run):
    run, ada, _ = training_run
    past = history.load_history(run)["rate"]
    now = int(time.time())
    hours = (now // 3600 + 24 * 365, 0)
    result = ingest_page(
        page(
            elsewhere(run, ada),
            rollups=[
                protocol.RollupRow(0, 3600, hour * 3600, 1, 1e6, 0, 0, 0, 0, 0) for hour in hours
            ],
            points=[
                protocol.LossRow(0, 1, 0, "train", 10**12, 1.0, now),
                protocol.LossRow(0, 2, 0, "train", 10, 1.0, now + 1e6),
            ],
        )
    )
    assert "2 sums of times outside the run" in result.left_out
    assert history.load_history(run)["rate"] == past
    point = LossPoint.objects.get(membership__mirror=OTHER)
    assert point.seq == 2 and point.at <= time.time(), (
        "a point beyond the budget or in the future was stored"
    )


def serve_page(fake_mirror: FakeMirror, telemetry_page: protocol.TelemetryPage, **changed):
    """Let the mirror serve a page.

    Args:
        fake_mirror: The mirror.
        telemetry_page: What it serves.
        changed: What to sign instead of the true values; `signer` signs instead of the mirror,
            `text` is sent instead of the page.
    """

    def answer(query, reader) -> protocol.SignedTelemetryPage:
        request = protocol.TelemetryRequest.model_validate_json(query["body"])
        text = changed.get("text", telemetry_page.model_dump_json())
        signature = {
            "mirror": fake_mirror.identity.key,
            "to": reader,
            "nonce": request.nonce,
            "digest": digest(text),
            **changed,
        }
        signer = changed.get("signer", fake_mirror.identity)
        signed = signer.sign("telemetry", protocol.PageSignature(**signature))
        return protocol.SignedTelemetryPage(signature=signed, text=text)

    fake_mirror.routes["POST /mirrors/telemetry"] = answer


def test_pull_continues_after_the_last_position(
    fake_mirror, training_run, django_capture_on_commit_callbacks
):
    run, ada, _ = training_run
    now = time.time()
    position = protocol.TelemetryPosition(memberships=(7, None))
    served = page(
        elsewhere(run, ada),
        memberships=[membership_row()],
        points=[protocol.LossRow(0, 77, 0, "train", 5000, 1.0, now)],
        position=position,
    )
    serve_page(fake_mirror, served)
    cursor = report_queue.points_cursor(run.pk)
    with django_capture_on_commit_callbacks(execute=True):
        assert pull.pull_all() == 2
    assert RemoteCursor.objects.get().position == position and RemoteCursor.objects.get().why == ""
    (point,), _ = report_queue.points_since(run.pk, cursor)
    assert point == {
        "machine": str(ada.machine.pk),
        "kind": "train",
        "tokens": 5000,
        "loss": 1.0,
        "at": point["at"],
    }
    assert Membership.everywhere.get(mirror=fake_mirror.identity.key).tokens == 9000


def answer_with_html(query, reader):
    """Answer as a web server without Barnraise does."""
    return 200, b"<!doctype html><title>It works!</title>"


PAGE_WITH_INVALID_EVENT = (
    page().model_dump_json().replace('"events":[]', '"events":[[0,"x","left",1]]')
)


@pytest.mark.parametrize(
    "altered, sentence",
    [
        ({"nonce": "f" * 32}, "a page that is not for this request"),
        ({"to": OTHER}, "a page that is not for this request"),
        ({"digest": "0" * 64}, "a page that is not for this request"),
        ({"signer": Identity(b"y" * 32)}, "is signed by"),
        ({"text": '{"machines": 7}'}, "its page of telemetry is malformed: machines"),
        ({"text": PAGE_WITH_INVALID_EVENT}, "events"),
        (answer_with_html, "something that is not Barnraise's API"),
    ],
)
def test_page_not_signed_for_this_mirror_is_refused(fake_mirror, training_run, altered, sentence):
    run, ada, _ = training_run
    if callable(altered):
        fake_mirror.routes["POST /mirrors/telemetry"] = altered
    else:
        serve_page(
            fake_mirror, page(elsewhere(run, ada), memberships=[membership_row()]), **altered
        )
    assert pull.pull_all() == 0 and sentence in RemoteCursor.objects.get().why
    assert not Membership.everywhere.filter(mirror=fake_mirror.identity.key).exists()
    request_count = len(fake_mirror.requests)
    assert pull.pull_all() == 0 and len(fake_mirror.requests) == request_count, (
        "the mirror was asked again at once"
    )
    serve_page(fake_mirror, page(elsewhere(run, ada), memberships=[membership_row()]))
    RemoteCursor.objects.update(tried=timezone.now() - timedelta(minutes=5))
    assert pull.pull_all() == 1 and RemoteCursor.objects.get().why == ""


def test_mirror_whose_log_pull_fails_is_not_asked_for_telemetry(fake_mirror):
    PeerStatus.objects.create(key=fake_mirror.identity.key, failures=1)
    assert pull.pull_all() == 0 and fake_mirror.requests == []


@pytest.mark.parametrize("failures", [0, 3])
def test_corrected_clock_delays_no_remote_telemetry(fake_mirror, training_run, failures):
    run, ada, _ = training_run
    serve_page(fake_mirror, page(elsewhere(run, ada), memberships=[membership_row()]))
    later = timezone.now() + timedelta(hours=1)
    RemoteCursor.objects.create(key=fake_mirror.identity.key, tried=later, failures=failures)
    assert pull.pull_all() == 1
    PeerStatus.objects.create(key=fake_mirror.identity.key, last_attempt=later, failures=3)
    assert replication_pull.pull_from_all()[fake_mirror.identity.key].refused == []


def test_rows_of_an_expelled_mirror_are_deleted(fake_mirror, training_run):
    run, ada, _ = training_run
    event = protocol.EventRow(0, "0192f0c1-4d3e-7f40-8a5b-6c7d8e9f0a1c", "left", time.time())
    serve_page(
        fake_mirror, page(elsewhere(run, ada), memberships=[membership_row()], events=[event])
    )
    pull.pull_all()
    assert RunEvent.objects.filter(mirror=fake_mirror.identity.key).exists()
    expelled_entry = fake_mirror.list_entry.model_copy(
        update={"expelled": Expulsion(at=2.0, last={})}
    )
    own_entry = MirrorEntry(
        key=site_identity.identity().key, url="https://here.example.org", name="here", admitted=1.0
    )
    mirror_list.ingest_lists([signed_list(2, own_entry, expelled_entry)])
    pull.pull_all()
    assert not Membership.everywhere.exclude(mirror="").exists()
    assert not RemoteCursor.objects.exists()
    assert not RunEvent.objects.filter(mirror=fake_mirror.identity.key).exists()
    assert RunEvent.objects.exists()


def test_telemetry_is_served_to_listed_mirrors_only(fake_mirror, training_run):
    path = "/api/v1/mirrors/telemetry"
    body = protocol.TelemetryRequest(nonce="0" * 32).model_dump_json().encode()

    def request_telemetry(identity: Identity):
        token = identity.sign_request(site_identity.identity().key, "POST", path, body, time.time())
        return Client().post(
            path, body, "application/json", headers={"Authorization": f"Barnraise {token}"}
        )

    assert request_telemetry(Identity(b"x" * 32)).status_code == 401
    assert Client().post(path).status_code == 401
    answer = request_telemetry(fake_mirror.identity)
    assert answer.status_code == 200, answer.content
    signed_page = protocol.SignedTelemetryPage.model_validate_json(answer.content)
    signature = json.loads(signed_page.signature.body)
    assert signature["to"] == fake_mirror.identity.key
    assert signature["digest"] == digest(signed_page.text)
    assert len(protocol.TelemetryPage.model_validate_json(signed_page.text).memberships) == 2


def test_export_and_ingest_query_counts_do_not_grow_with_machines(
    training_run, volunteer, numbered_report
):
    run, ada, _ = training_run
    others = [volunteer(run.owner, seed) for seed in range(10, 40)]
    counts = []
    position = export.build_page(protocol.TelemetryPosition()).position
    for machine in others:
        machine.join(run)
    for reporting, seq in (([ada], 4), ([ada, *others], 5)):
        for machine in reporting:
            assert machine.report(run, numbered_report(seq)).status_code == 200
        drain_queue(wait=True)
        with CaptureQueriesContext(connection) as export_queries:
            exported = export.build_page(position)
        with CaptureQueriesContext(connection) as ingest_queries:
            ingest_page(exported)
        assert len(exported.memberships) == len(reporting) and len(export_queries) == 5
        size = len(exported.model_dump_json()) / len(reporting)
        assert size < 2000, f"{size:.0f} bytes a report"
        counts.append(len(ingest_queries))
        position = exported.position
    assert counts[1] <= counts[0] + 1, counts
