"""Test a person's machines: names, list, pause and resume, revocation, measured hardware."""

import json
import time
from dataclasses import replace

import pytest
from django.test import Client
from django.utils import timezone
from helpers.mirrors.event_log_builder import LogBuilder
from helpers.mirrors.rebuild_site import (
    all_events,
    all_private_data,
    rebuild_in_random_order,
    replicated_rows,
)
from helpers.site.enrolment_requests import enrolment_request
from helpers.site.machine_replies import read_directive, read_reply
from helpers.site.pages import open_client

from barnraise.protocol import coordinator_messages, enums, reports
from barnraise.protocol.signing import Identity
from coordinator.accounts.models import Enrolment, Machine
from coordinator.audit.models import AuditEntry
from coordinator.eventlog import ingest, private_data, registry
from coordinator.fleet.machine_state import HardwareMeasurement, MachinePause
from coordinator.fleet.models import Membership
from coordinator.lib import site_identity

pytestmark = pytest.mark.django_db


@pytest.fixture
def signed_in_as():
    def sign_in(user) -> Client:
        client = open_client(user)
        return client

    return sign_in


# ---- paused and resumed


def test_pause_reaches_only_the_paused_machine_with_its_next_report(
    shared_run, numbered_report, signed_in_as
):
    run, ada, bob = shared_run
    page = signed_in_as(bob.machine.owner)
    assert page.post(f"/machines/{bob.machine.pk}/pause/").status_code == 302
    assert (
        read_directive(read_reply(bob.report(run, numbered_report(1)))).status
        is enums.RunStatus.PAUSED
    )
    assert (
        read_directive(read_reply(ada.report(run, numbered_report(1)))).status
        is enums.RunStatus.TRAINING
    )
    assert page.post(f"/machines/{bob.machine.pk}/resume/").status_code == 302
    assert (
        read_directive(read_reply(bob.report(run, numbered_report(2)))).status
        is enums.RunStatus.TRAINING
    )


def test_paused_machine_stays_paused_when_it_joins_again(adas_run, numbered_report):
    run, ada = adas_run
    assert MachinePause.start(ada.machine, actor=run.owner) and not MachinePause.start(ada.machine)
    reply = ada.join(run)
    assert read_directive(reply).status is enums.RunStatus.PAUSED
    run.finish()
    assert (
        read_directive(read_reply(ada.report(run, numbered_report(1)))).status
        is enums.RunStatus.FINISHED
    )


def test_pause_is_audited_once_and_refused_for_revoked_machines(person, volunteer):
    ada = volunteer(person())
    assert MachinePause.start(ada.machine, actor=ada.machine.owner)
    assert MachinePause.end(ada.machine)
    assert not MachinePause.end(ada.machine)
    assert list(AuditEntry.objects.order_by("id").values_list("action", flat=True)) == [
        "machine.pause",
        "machine.resume",
    ]
    assert AuditEntry.objects.earliest("id").actor == ada.machine.owner
    ada.machine.revoke()
    assert not MachinePause.start(ada.machine)


def test_pause_for_a_time_ends_by_itself(adas_run, numbered_report, signed_in_as):
    run, ada = adas_run
    page = signed_in_as(run.owner)
    path = f"/machines/{ada.machine.pk}/"
    for form in ({"for": "0"}, {"for": "1h", "until": "07:00"}, {"until": "yesterday"}):
        answer = page.post(f"{path}pause/", form, follow=True).content.decode()
        assert "was not paused" in answer and not MachinePause.objects.exists()
    page.post(f"{path}pause/", {"for": "1h", "offset": "60"})
    directive = read_directive(read_reply(ada.report(run, numbered_report(1))))
    assert directive.status is enums.RunStatus.PAUSED and directive.own_pause
    assert directive.pause_until == pytest.approx(time.time() + 3600, abs=60)
    assert "but does not train until" in page.get(path).content.decode()
    MachinePause.objects.update(until=timezone.now())
    directive = read_directive(read_reply(ada.report(run, numbered_report(2))))
    assert directive.status is enums.RunStatus.TRAINING and not directive.own_pause
    assert "does not train until" not in page.get(path).content.decode()
    assert MachinePause.start(ada.machine, actor=run.owner), "the one that is over is replaced"
    assert MachinePause.objects.get().until is None


def test_gpu_that_no_sensor_measures_has_no_curves(adas_run, numbered_report, signed_in_as):
    run, ada = adas_run
    for seq, load in ((1, None), (2, 0.5)):
        ada.store_reports(run, numbered_report(seq, system=reports.SystemView(gpu=load)))
        page = signed_in_as(run.owner).get(f"/machines/{ada.machine.pk}/").content.decode()
        assert ('data-machine-chart="gpu"' in page) == (load is not None)


def test_next_time_of_a_clock_is_that_of_the_reader(adas_run, signed_in_as):
    run, ada = adas_run
    signed_in_as(run.owner).post(
        f"/machines/{ada.machine.pk}/pause/", {"until": "07:00", "offset": "-210"}
    )
    until = MachinePause.objects.get().until
    assert (until.hour, until.minute) == (10, 30) and until > timezone.now()


def test_machine_page_shows_every_rule_and_why_the_machine_pauses(
    adas_run, numbered_report, signed_in_as
):
    run, ada = adas_run
    rules = reports.LimitsView(
        memory=8 * 10**9,
        hours="mon-fri 19:00-07:00, sat-sun",
        idle=10,
        on_battery=False,
        busy_cpu=50,
        pause_for=["<blender>"],
        threads=4,
        cpu=60,
        max_temperature=85,
        month_up=20 * 10**9,
        download=10**6,
    )
    pause = reports.PauseView(reason=enums.PauseReason.PROGRAM)
    sentence = "paused: <blender> is running"
    report = numbered_report(1, limits=rules, log=[reports.LogLine(at=1.0, level="info", text="x")])
    fields = {"activity": "paused", "pause": pause, "pause_sentence": sentence}
    ada.store_reports(run, report.model_copy(update=fields))
    page = signed_in_as(run.owner).get(f"/machines/{ada.machine.pk}/").content.decode()
    for text in (
        "mon-fri 19:00-07:00, sat-sun",
        "trains after 10 min without keyboard and mouse",
        "does not train",
        "pauses above 50 % by other programs",
        "&lt;blender&gt;",
        "pauses from 85 °C",
        "20 GB",
        "1 MB/s",
        "8 GB",
        "Paused: &lt;blender&gt; is running",
        "paused: a program runs that goes first",
    ):
        assert text in page, text


def test_report_of_a_paused_machine_costs_no_more_queries(
    adas_run, numbered_report, django_assert_max_num_queries
):
    run, ada = adas_run
    ada.report(run, numbered_report(1))  # fills the caches
    with django_assert_max_num_queries(8):
        ada.report(run, numbered_report(2))
    MachinePause.start(ada.machine)
    with django_assert_max_num_queries(8):
        ada.report(run, numbered_report(3))


# ---- the pages


def test_machine_pages_show_hardware_activity_and_last_report(
    person, launched_run, numbered_report, signed_in_as, golden_hardware, plan
):
    run, ada = launched_run(person(name="Ada"))
    assert ada.request_join(run, hardware=golden_hardware).status_code == 200
    ada.store_reports(run, numbered_report(1, rate=1234.0, plan=plan))
    page = signed_in_as(run.owner)
    listed = page.get("/machines/").content.decode()
    assert "pc-1" in listed and "1.23 K" in listed and "Training" in listed and run.name in listed
    machine_page = page.get(f"/machines/{ada.machine.pk}/").content.decode()
    assert "12.9 GB" in machine_page
    assert "25.0 TFLOP/s" in machine_page
    assert "2.5 GB/s" in machine_page
    assert "bfloat16" in machine_page
    assert run.name in machine_page
    MachinePause.start(ada.machine)
    assert 'data-status="paused">Paused<' in page.get("/machines/").content.decode()


def test_machine_that_trains_and_serves_another_run_is_shown_as_training(
    person, launched_run, numbered_report, signed_in_as
):
    owner = person()
    trained, ada = launched_run(owner, name="Trained")
    served, _ = launched_run(owner, seed=2, name="Served")
    ada.join(served)
    ada.store_reports(trained, numbered_report(1))
    ada.store_reports(served, numbered_report(1, activity=enums.Activity.FINISHED))
    page = signed_in_as(owner)
    for address in ("/machines/", f"/machines/{ada.machine.pk}/"):
        html = page.get(address).content.decode()
        assert 'data-status="training">Training<' in html, address
    assert "in Trained<" in page.get("/machines/").content.decode()


def test_machine_list_query_count_is_independent_of_machines(
    adas_run, volunteer, signed_in_as, django_assert_max_num_queries
):
    run, _ = adas_run
    for seed in range(2, 12):
        volunteer(run.owner, seed).join(run)
    page = signed_in_as(run.owner)
    with django_assert_max_num_queries(8):
        assert page.get("/machines/").content.count(b"item is-machine") == 11


def test_renamed_machine_keeps_its_name_when_it_enrols_again(person, volunteer, signed_in_as):
    ada = volunteer(person())
    page = signed_in_as(ada.machine.owner)
    machine_path = f"/machines/{ada.machine.pk}/"
    refused = page.post(machine_path, {"name": "x" * 61})
    assert refused.status_code == 422 and b"at most 60 characters; this has 61" in refused.content
    assert b'value="' + b"x" * 61 in refused.content, "the form lost the name that was typed"
    assert page.post(machine_path, {"name": "  <b>attic</b> \0‮ 🛖 "}).status_code == 302
    ada.machine.refresh_from_db()
    assert ada.machine.name == "<b>attic</b> 🛖"
    assert b"&lt;b&gt;attic" in page.get(machine_path).content
    assert b"<b>attic" not in page.get(machine_path).content
    Enrolment.open(enrolment_request(ada.identity)).approve(ada.machine.owner)
    ada.machine.refresh_from_db()
    assert ada.machine.name == "<b>attic</b> 🛖" and ada.machine.cores == 8
    page.post(machine_path, {"name": ""})
    ada.machine.refresh_from_db()
    assert ada.machine.name == f"machine {ada.identity.key[:8]}"


def test_get_request_does_not_pause_a_machine(person, volunteer, signed_in_as):
    ada = volunteer(person())
    assert (
        signed_in_as(ada.machine.owner).get(f"/machines/{ada.machine.pk}/pause/").status_code == 405
    )
    assert not MachinePause.objects.exists()


# ---- measured hardware


def test_stored_measurement_equals_what_the_machine_reported(adas_run, golden_hardware):
    run, ada = adas_run
    ada.request_join(run, hardware=golden_hardware)
    hardware = HardwareMeasurement.objects.get(machine=ada.machine).hardware
    assert hardware.device == "cuda"
    assert hardware.device_memory == 12 << 30
    assert hardware.matmul[-1] == (2048, 25e12)
    assert hash(hardware), "plans are cached by hardware"
    assert hardware.update_rate("device", "bfloat16", 8) == 4e9
    ada.join(run)  # without a measurement: the last one remains
    assert HardwareMeasurement.objects.get(machine=ada.machine).hardware == hardware


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("adam", 0),
        ("adam", 0.5),
        ("matmul", []),
        ("matmul", [[1, -1]]),
        ("disk_read", "NaN"),
        ("device", "tpu"),
        ("cores", 0),
        ("memory", 1 << 64),
        ("name", "a\0b"),
        ("updates", [{"where": "moon"}] * 3),
        ("products", [{}] * 99),
    ],
)
def test_invalid_measurement_is_refused_at_its_field(adas_run, golden_hardware, name, value):
    run, ada = adas_run
    body = {
        "version": "0.1",
        "addresses": [],
        "hardware": golden_hardware.model_dump(mode="json") | {name: value},
    }
    raw_body = json.dumps(body).encode()
    answer = ada.send_request("POST", f"/runs/{run.slug}/join", sent=raw_body, body=raw_body)
    assert answer.status_code == 422
    assert any(
        f"hardware.{name}" in field
        for field in coordinator_messages.Problem.model_validate_json(answer.content).fields
    )
    assert not HardwareMeasurement.objects.exists()
    assert Membership.objects.filter(run=run).count() == 1


# ---- replays


def test_request_signed_for_another_mirror_is_refused(person, volunteer, monkeypatch):
    ada = volunteer(person())
    token = ada.identity.sign_request(ada.mirror_key, "GET", "/api/v1/runs", b"", time.time())
    assert ada.send_request("GET", "/runs", token=token).status_code == 200
    other = Identity(b"\x77" * 32)
    other_token = ada.identity.sign_request(other.key, "GET", "/api/v1/runs", b"", time.time())
    assert ada.send_request("GET", "/runs", token=other_token).status_code == 401
    # The same database now serves another mirror's key.
    monkeypatch.setattr(site_identity, "identity", lambda: other)
    assert ada.send_request("GET", "/runs", token=token).status_code == 401
    assert ada.send_request("GET", "/runs", token=other_token).status_code == 200
    assert ada.send_request("GET", "/runs", token=other_token).status_code == 401


# ---- at other mirrors


def test_events_of_known_machines_are_written_in_one_batch(person, volunteer):
    ada = person()
    attic, barn, shed, sold = (volunteer(ada, n).machine for n in range(1, 5))
    before = all_events(), all_private_data()
    attic.rename("the attic")
    barn.rename("the barn")
    shed.rename("unheard of")
    sold.revoke()
    rows_elsewhere = replicated_rows()
    events = all_events()
    records = all_private_data()
    late_records = [record for record in records if "unheard" in record.body]
    rebuild_in_random_order(*before)
    machine_type = registry.aggregate_types()["machine"]
    stored_alone = []

    def store(name, state):
        stored_alone.append(name)
        return machine_type.store(name, state)

    with registry.registered_temporarily(replace(machine_type, store=store)):
        ingest.ingest_events(events, defer=True)
        ingest.project_pending(defer=True)
        private_data.ingest(
            [record for record in records if record not in late_records], defer=True
        )
        ingest.project_pending()
    assert set(stored_alone) == {shed.key}, "machines with complete data were not written together"
    names = dict(Machine.objects.values_list("key", "hostname"))
    assert names == {
        attic.key: "the attic",
        barn.key: "the barn",
        shed.key: "pc-3",
        sold.key: "pc-4",
    }
    assert Machine.objects.get(key=sold.key).revoked
    private_data.ingest(late_records)
    assert replicated_rows() == rows_elsewhere


def test_event_that_reassigns_a_machine_id_is_ignored(person, volunteer):
    ada = person()
    machine = volunteer(ada, 1).machine
    other = LogBuilder()
    content_digest = "0" * 64
    enrolled = machine.enrolled.isoformat()
    for n in range(3):
        key = Identity(bytes([90 + n]) * 32).key
        other.append(
            "machine.enrol",
            key,
            {
                "content_digest": content_digest,
                "id": str(machine.pk),
                "owner": str(ada.pk),
                "enrolled": enrolled,
            },
        )
    before = Machine.objects.values().get()
    ingest.ingest_events(other.events)
    assert Machine.objects.values().get(key=machine.key) == before
