"""Test health, readiness, metrics and the status of the logs."""

import re
import time

import pytest
from django.db import OperationalError, connection
from django.test import Client
from helpers.site.metrics_page import parse_metrics
from helpers.site.stored_heartbeats import set_heartbeats

from coordinator.eventlog import projection, writer
from coordinator.lib import counters, heartbeats, site_identity
from coordinator.lib.embedded import embedded_servers, valkey_server
from coordinator.live.broadcaster import watchers
from coordinator.telemetry.rollup import drain_queue

pytestmark = pytest.mark.django_db


def test_status_page_shows_heads_and_state_hash(db, note_rows):
    event = writer.record("note.write", "a", {"text": "x"})
    status = Client().get("/status").json()
    assert (status["key"], status["state"]) == (
        site_identity.identity().key,
        projection.state_hash(),
    )
    assert status["heads"] == {event.origin_id: {"seq": 2, "digest": event.digest}}
    assert abs(status["time"] - time.time()) < 60


LABELS = {"view", "method", "status", "task", "outcome", "le", "queue", "part", "process"}


def test_site_with_database_and_valkey_is_alive_and_ready(client, valkey):
    assert client.get("/healthz").content == b"ok\n"
    answer = client.get("/readyz")
    assert answer.status_code == 200 and answer.json() == {
        "ready": True,
        "database": "ok",
        "valkey": "ok",
        "background": "ok",
        "broadcasts": "ok",
    }
    assert "no-store" in answer["Cache-Control"]
    assert client.post("/healthz").status_code == 405


def test_health_without_valkey_is_alive_and_not_ready(client, state):
    valkey_server.stop_valkey(state)
    try:
        assert client.get("/healthz").status_code == 200
        answer = client.get("/readyz")
        assert answer.status_code == 503 and answer.json()["valkey"] == "does not answer"
        assert client.get("/metrics").status_code == 503
    finally:
        embedded_servers.start(state, durable=False)
    assert client.get("/readyz").status_code == 200


def test_database_without_its_migrations_is_not_ready(client, valkey):
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM django_migrations WHERE app = 'telemetry'")
    answer = client.get("/readyz")
    assert answer.status_code == 503 and "migrations are not applied" in answer.json()["database"]


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ("schedule", "beat has not looked for due tasks"),
        ("reports", "Celery has moved no reports into Postgres"),
        ("events", "Celery has applied no events of other mirrors"),
    ],
)
def test_readyz_names_a_background_part_that_stopped(client, valkey, part, sentence):
    set_heartbeats(valkey, **{part: 31.0})
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert re.fullmatch(rf"{sentence} for \d+ s", answer.json()["background"])
    ages = parse_metrics(client.get("/metrics").content.decode())
    assert ages[f'barnraise_heartbeat_age_seconds{{part="{part}"}}'] >= 31
    set_heartbeats(valkey)
    assert client.get("/readyz").status_code == 200


def test_readyz_and_metrics_name_broadcasts_that_stopped(client, valkey, monkeypatch):
    monkeypatch.setattr(watchers, "longest_silence", lambda: 31.0)
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["broadcasts"] == "a run's watchers have received nothing for 31 s"
    ages = parse_metrics(client.get("/metrics").content.decode())
    assert ages['barnraise_heartbeat_age_seconds{part="broadcasts"}'] == 31


def test_part_that_never_advanced_counts_from_the_first_look(client, valkey, monkeypatch):
    valkey.delete(heartbeats.KEY)
    assert client.get("/readyz").status_code == 200
    now = time.time()
    monkeypatch.setattr(heartbeats.time, "time", lambda: now + 40)
    assert "Celery has moved no reports" in client.get("/readyz").json()["background"]


def test_metrics_label_views_and_never_machines_or_runs(adas_run, numbered_report, client, valkey):
    run, ada = adas_run
    for seq in range(1, 4):
        ada.report(run, numbered_report(seq))
    drain_queue()
    client.get(f"/runs/{run.slug}/")
    client.get("/nowhere/at/all/")
    client.generic("BREW", "/")
    text = client.get("/metrics").content.decode()
    samples = parse_metrics(text)
    assert (
        samples['barnraise_requests_total{method="POST",status="200",view="api-1:post_reports"}']
        == 3
    )
    assert samples['barnraise_requests_total{method="GET",status="200",view="run"}'] == 1
    assert samples['barnraise_requests_total{method="GET",status="404",view="none"}'] == 1
    assert samples['barnraise_runs{status="training"}'] == 1
    assert samples["barnraise_machines_alive"] == 1
    assert samples["barnraise_reports_total"] == 3
    assert samples['barnraise_queue{queue="reports"}'] == 0
    for secret in (
        run.slug,
        str(run.pk),
        str(ada.machine.pk),
        ada.machine.name,
        ada.identity.key[:8],
    ):
        assert secret not in text
    names = {
        label.partition("=")[0]
        for s in samples
        for label in s.partition("{")[2].rstrip("}").split(",")
        if label
    }
    assert names <= LABELS


def test_histogram_buckets_are_cumulative(client, valkey):
    for seconds in (0.001, 0.004, 0.3, 0.3, 99.0):
        counters.observe("barnraise_task_seconds", seconds, task="x")
    samples = parse_metrics(client.get("/metrics").content.decode())
    buckets = {s: v for s, v in samples.items() if s.startswith("barnraise_task_seconds_bucket")}
    assert list(buckets.values()) == sorted(buckets.values())
    assert len(buckets) == len(counters.BUCKETS) + 1
    assert samples['barnraise_task_seconds_bucket{le="0.005",task="x"}'] == 2
    assert samples['barnraise_task_seconds_bucket{le="0.5",task="x"}'] == 4
    assert (
        samples['barnraise_task_seconds_bucket{le="+Inf",task="x"}']
        == samples['barnraise_task_seconds_count{task="x"}']
        == 5
    )
    assert samples['barnraise_task_seconds_sum{task="x"}'] == pytest.approx(99.605)


def test_metric_label_is_escaped(client, valkey):
    counters.increment("barnraise_tasks_total", task='a"} 9\nb\\')
    assert r'barnraise_tasks_total{task="a\"} 9\nb\\"} 1' in client.get("/metrics").content.decode()


def test_metrics_require_the_token_if_one_is_set(client, valkey, settings):
    settings.METRICS_TOKEN = "sesame"
    assert client.get("/metrics").status_code == 401
    assert client.get("/metrics", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert client.get("/metrics", headers={"Authorization": "Bearer é"}).status_code == 401
    assert client.get("/metrics", headers={"Authorization": "Bearer sesame"}).status_code == 200


def test_health_needs_no_session_and_no_query(django_assert_num_queries):
    with django_assert_num_queries(0):
        answer = Client().get("/healthz")
    assert not answer.cookies


@pytest.mark.parametrize("hosts", [["barn.example.org"], [".example.org"], ["*"]])
def test_health_answers_whatever_host_a_load_balancer_names(client, valkey, settings, hosts):
    settings.ALLOWED_HOSTS, settings.SECURE_SSL_REDIRECT = hosts, True
    for path in settings.INSIDE_PATHS:
        for host in ("10.0.0.5:8000", "[fd00::5]", "not_a_host!", ""):
            assert client.get(path, headers={"host": host}).status_code == 200
    if hosts != ["*"]:
        assert client.get("/", headers={"host": "10.0.0.5"}, secure=True).status_code == 400


def test_site_without_postgres_is_alive_and_not_ready(client, valkey, monkeypatch):
    def refuse() -> None:
        raise OperationalError("the connection was refused")

    monkeypatch.setattr(connection, "ensure_connection", refuse)
    assert client.get("/healthz").status_code == 200
    answer = client.get("/readyz")
    assert answer.status_code == 503 and not answer.json()["ready"]
    assert (answer.json()["database"], answer.json()["valkey"]) == ("does not answer", "ok")
    assert client.get("/metrics").status_code == 503
