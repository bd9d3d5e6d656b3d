"""Test that three mirrors converge to the same rows and state hash in any order of events."""

import json
import time
from functools import partial
from random import Random

import pytest
from django.db import transaction
from helpers.effort import examples
from helpers.mirrors.event_log_builder import LogBuilder
from helpers.mirrors.rebuild_site import (
    empty_tables,
    rebuild_in_one_batch,
    rebuild_in_random_order,
    replicated_rows,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.protocol.signing import digest
from coordinator.eventlog import ingest, private_data, projection
from coordinator.eventlog.event import open_event
from coordinator.runs.spec_form import spec_from_fields

PEOPLE = [f"01890000-0000-7000-8000-{n:012x}" for n in range(3)]
AT = "2026-01-01T00:00:00.000001Z"


def store_record(records: list[private_data.PrivateRecord], **fields) -> str:
    """Store private data, and return its digest."""
    body = projection.canonical_json(fields)
    records.append(private_data.PrivateRecord(digest("0" * 32 + body), "0" * 32, body))
    return records[-1].digest


def random_logs(random: Random) -> tuple[list[LogBuilder], list[private_data.PrivateRecord]]:
    """Write the logs of three disconnected mirrors about the same people, teams and runs.

    Returns:
        The logs, and the private data that their events name.
    """
    mirrors = [LogBuilder(n) for n in (1, 2, 3)]
    private_records: list[private_data.PrivateRecord] = []
    spec = spec_from_fields({"seed": 1})
    clock = time.time() - 1000

    store_private = partial(store_record, private_records)

    def build_draft(version: int) -> dict:
        draft = json.loads(spec.to_json())
        content_digest = store_private(
            slug="barn", name=random.choice(["Barn", "Hay"]), draft=draft
        )
        return {
            "version": version,
            "content_digest": content_digest,
            "text_id": "a" * 16,
            "slug_digest": digest("barn"),
        }

    bans: list[str] = []
    # People come first; what belongs to them would wait for them.
    for n, person in enumerate(PEOPLE):
        content_digest = store_private(name=f"P{n}", email=f"{n}@example.org", password="!")
        payload = {"content_digest": content_digest, "joined": AT}
        random.choice(mirrors).append("person.join", person, payload, at=clock)
    for _ in range(random.randint(20, 50)):
        mirror = random.choice(mirrors)
        person = random.choice(PEOPLE)
        n = random.randint(0, 2)
        thing = PEOPLE[n].replace("-8000-", "-9000-")
        some_id = PEOPLE[n].replace("-8000-", f"-a{random.randint(0, 9)}00-")
        content_digest = store_private(
            name=f"P{n}", email=f"{person[-1]}@example.org", password="!"
        )
        create = {
            "owner": person,
            "report_every": 1.0,
            "quorum": 1,
            "created": AT,
            "draft": build_draft(0),
            "join_policy": {"version": 0, "access": "team", "team": thing},
        }
        founder = {"membership": some_id, "person": person, "joined": AT, "leads": True}
        event_type, name, payload = random.choice(
            [
                ("person.join", person, {"content_digest": content_digest, "joined": AT}),
                ("person.change_profile", person, {"content_digest": content_digest}),
                ("person.change_right", person, {"right": "organiser", "given": bool(n)}),
                ("person.ban", person, {"at": AT}),
                ("person.unban", person, {"lifts": bans[: random.randint(0, 3)]}),
                (
                    "machine.enrol",
                    digest(str(n)),
                    {
                        "id": some_id,
                        "owner": person,
                        "enrolled": AT,
                        "content_digest": store_private(
                            hostname=f"pc {n}",
                            system="",
                            processor="",
                            cores=n,
                            memory_bytes=n,
                            accelerator="",
                        ),
                    },
                ),
                ("machine.revoke", digest(str(n)), {"at": AT}),
                (
                    "team.create",
                    thing,
                    founder
                    | {"name": random.choice(["Wool", "wool"]), "slug": "wool", "created": AT},
                ),
                ("team.join", thing, founder | {"leads": False}),
                ("team.leave", thing, {"memberships": [some_id]}),
                ("team.rename", thing, {"name": random.choice(["Wool", "Silk"])}),
                ("run.create", thing, create),
                ("run.edit", thing, build_draft(random.randint(1, 3))),
                (
                    "run.change_status",
                    thing,
                    {"status": random.choice(["training", "paused"]), "epoch": n, "at": AT},
                ),
                ("run.extend", thing, {"tokens": n + 1}),
                ("pause.start", digest(str(n)), {"at": AT}),
                ("pause.end", digest(str(n)), {}),
                (
                    "credit.receipt",
                    f"{thing}:{digest(str(n))}:{'a' * 16}",
                    {"day": f"2026-01-0{n + 1}", "first": n + 1, "last": n + 4, "tokens": 40},
                ),
            ]
        )
        clock += random.random()
        event = mirror.append(event_type, name, payload, at=clock)
        if event_type == "person.ban":
            bans.append(open_event(event).id)
    return mirrors, private_records


@pytest.mark.django_db
def test_team_that_was_empty_for_a_while_gets_its_runs_back():
    """A team without members has no row, so its runs refer to none until somebody has joined."""
    person = PEOPLE[0]
    team = PEOPLE[0].replace("-8000-", "-9000-")
    memberships = [team.replace("-9000-", f"-a{n}00-") for n in (1, 2)]
    private_records: list[private_data.PrivateRecord] = []

    store_private = partial(store_record, private_records)
    north, east, south = (LogBuilder(n) for n in (1, 2, 3))
    content_digest = store_private(name="P0", email="0@example.org", password="!")
    member = {"person": person, "joined": AT}
    draft = json.loads(spec_from_fields({"seed": 1}).to_json())
    run = {
        "owner": person,
        "report_every": 1.0,
        "quorum": 1,
        "created": AT,
        "draft": {
            "version": 0,
            "content_digest": store_private(slug="barn", name="Barn", draft=draft),
            "text_id": "a" * 16,
            "slug_digest": digest("barn"),
        },
        "join_policy": {"version": 0, "access": "team", "team": team},
    }
    created = {
        "membership": memberships[0],
        "leads": True,
        "name": "Wool",
        "slug": "wool",
        "created": AT,
    }
    north.append("person.join", person, {"content_digest": content_digest, "joined": AT})
    north.append("team.create", team, member | created)
    north.append("run.create", team, run)
    east.append("team.leave", team, {"memberships": [memberships[0]]})
    south.append("team.join", team, member | {"membership": memberships[1], "leads": False})
    logs = [north, east, south]
    events = [event for log in logs for event in log.events]
    expected = rebuild_in_one_batch(events, private_records)
    assert expected[0]["Run"][0]["team_id"] is not None
    empty_tables()
    for log in logs:
        assert not ingest.ingest_events(log.events).rejected
        private_data.ingest(private_records)
        ingest.project_pending()
    assert (replicated_rows(), projection.state_hash()) == expected


@pytest.mark.django_db
@given(st.integers(0, 1 << 32))
@settings(max_examples=examples(3, 20), deadline=None, derandomize=True)
def test_three_mirrors_converge_to_equal_rows_and_hash_in_any_order(seed):
    mirrors, private_records = random_logs(Random(seed))
    events = [event for mirror in mirrors for event in mirror.events]
    with transaction.atomic():
        first = rebuild_in_random_order(events, private_records, seed)
        assert first[1] != "0" * 64
        for n in (1, 2):
            assert rebuild_in_random_order(events, private_records, seed + n) == first
        transaction.set_rollback(True)
