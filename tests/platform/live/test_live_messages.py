"""Test that messages to pages follow their schema, which generates the TypeScript types."""

import json

import pytest
from django.test import Client
from helpers.paths import GOLDEN
from helpers.site.pages import open_client

from barnraise.protocol import reports
from coordinator.live.broadcaster import Broadcaster
from coordinator.live.live_messages import (
    DeltaMessage,
    LiveMessage,
    SnapshotMessage,
    SwarmMessage,
    WorkerCurvesMessage,
)
from coordinator.live.typescript import TYPES_FILE, generate_types


def assert_follows_schema(model: type[LiveMessage], message: bytes | str | None) -> None:
    """Assert that there is a message, that it is valid and that the schema has all its fields."""
    assert message is not None
    parsed = model.model_validate_json(message, strict=True)
    assert parsed.model_dump(mode="json", exclude_unset=True) == json.loads(message)


def test_committed_types_are_those_generated_from_the_models():
    assert TYPES_FILE.read_text(encoding="utf-8") == generate_types(), (
        "run `PYTHONPATH=platform:worker .venv/bin/python -m coordinator.live.typescript`"
    )


def test_generated_types_distinguish_absent_fields_from_null():
    types = generate_types()
    assert "  waiting: string | null;" in types
    assert "  tokens?: number;" in types and "  waiting?: string | null;" in types
    assert "  removed_workers?: string[];" in types
    assert "  plans: Record<string, PlanView>;" in types
    assert "export type Point = [number, number];" in types


@pytest.mark.parametrize(
    ("model", "name"), [(SnapshotMessage, "live_snapshot"), (DeltaMessage, "live_delta")]
)
def test_golden_message_follows_its_schema(model, name):
    assert_follows_schema(model, (GOLDEN / f"{name}.json").read_bytes())


@pytest.mark.django_db(transaction=True)
def test_messages_of_a_training_run_follow_their_schema(adas_run, numbered_report, plan):
    run, volunteer = adas_run
    exchange = reports.ExchangeView(
        round_steps=20,
        scheme="dense4",
        density=1.0,
        bits_per_parameter=4.0,
        sent_rate=0.0,
        received_rate=0.0,
        uplink_rate=0.0,
        lag=0,
    )
    broadcaster = Broadcaster(str(run.pk))
    assert volunteer.report(run, numbered_report(1)).status_code == 200
    first = broadcaster.next_delta()
    assert_follows_schema(DeltaMessage, first)
    losses = [
        reports.MeasuredLoss(kind=kind, tokens=2000, loss=4.25) for kind in ("train", "validation")
    ]
    report = numbered_report(2, plan=plan, step_seconds=5.1, exchange=exchange, points=losses)
    assert volunteer.report(run, report).status_code == 200
    second = broadcaster.next_delta() or ""
    assert_follows_schema(DeltaMessage, second)
    assert {"run", "worker_changes", "plans", "train", "validation"} <= set(json.loads(second))

    stored = Client().get(f"/live/{run.pk}/").content
    broadcaster.release_lock()
    built = Client().get(f"/live/{run.pk}/").content
    for snapshot in (stored, built):
        assert_follows_schema(SnapshotMessage, snapshot)
        assert json.loads(snapshot)["plans"]
    curves = Client().get(f"/live/{run.pk}/machines/").content
    assert_follows_schema(WorkerCurvesMessage, curves)
    assert_follows_schema(SwarmMessage, Client().get(f"/live/{run.pk}/swarm/").content)


def test_messages_of_a_draft_follow_their_schema(person, draft, valkey):
    owner = person()
    run = draft(owner)
    client = open_client(owner)
    assert_follows_schema(SnapshotMessage, client.get(f"/live/{run.pk}/").content)
    assert_follows_schema(DeltaMessage, Broadcaster(str(run.pk)).next_delta())
