"""Whatever happened at three mirrors, and however it is heard: rows and hash are one."""

import json
import time
from random import Random

import pytest
from django.db import transaction
from helpers.effort import examples
from helpers.event_log_builder import LogBuilder
from helpers.rebuild_site import rebuild_in_random_order
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.protocol.signing import digest
from coordinator.eventlog import private_data, projection
from coordinator.eventlog.event import open_event
from coordinator.runs.spec_form import spec_from_fields

WHO = [f"01890000-0000-7000-8000-{n:012x}" for n in range(3)]
AT = "2026-01-01T00:00:00.000001Z"


def happenings(chance: Random) -> tuple[list[LogBuilder], list[private_data.PrivateRecord]]:
    """Three mirrors that hear nothing of each other do things to the same people, teams, machines and runs."""
    mirrors, kept = [LogBuilder(n) for n in (1, 2, 3)], []
    spec = spec_from_fields({"seed": 1})
    clock = time.time() - 1000

    def keep(**said) -> str:
        body = projection.canonical_json(said)
        kept.append(private_data.PrivateRecord(digest("0" * 32 + body), "0" * 32, body))
        return kept[-1].digest

    def written(version: int) -> dict:
        draft = json.loads(spec.to_json())
        about = keep(slug="barn", name=chance.choice(["Barn", "Hay"]), draft=draft)
        return {"version": version, "about": about, "text": "a" * 16}

    bans: list[str] = []
    for n, who in enumerate(WHO):  # people come first, or what is theirs waits
        said = {"about": keep(name=f"P{n}", email=f"{n}@example.org", password="!"), "joined": AT}
        chance.choice(mirrors).append("person.join", who, said, at=clock)
    for _ in range(chance.randint(20, 50)):
        mirror, who, n = chance.choice(mirrors), chance.choice(WHO), chance.randint(0, 2)
        thing, place = (
            WHO[n].replace("-8000-", "-9000-"),
            WHO[n].replace("-8000-", f"-a{chance.randint(0, 9)}00-"),
        )
        about = keep(name=f"P{n}", email=f"{who[-1]}@example.org", password="!")
        create = {
            "word": digest("barn"), "owner": who, "report_every": 1.0, "quorum": 1, "created": AT,
            "settings": written(0), "terms": {"version": 0, "access": "team", "team": thing},
        }  # fmt: skip
        found = {"place": place, "person": who, "joined": AT, "leads": True}
        type, which, said = chance.choice([
            ("person.join", who, {"about": about, "joined": AT}),
            ("person.about", who, {"about": about}),
            ("person.grant", who, {"right": "organiser", "given": bool(n)}),
            ("person.ban", who, {"at": AT}),
            ("person.unban", who, {"lifts": bans[: chance.randint(0, 3)]}),
            ("machine.enrol", digest(str(n)), {"id": place, "owner": who, "enrolled": AT, "about": keep(
                hostname=f"pc {n}", system="", processor="", cores=n, memory_bytes=n, accelerator="")}),
            ("machine.revoke", digest(str(n)), {"at": AT}),
            ("team.found", thing, found | {"name": chance.choice(["Wool", "wool"]), "slug": "wool", "created": AT}),
            ("team.join", thing, found | {"leads": False}),
            ("team.part", thing, {"places": [place]}),
            ("team.rename", thing, {"name": chance.choice(["Wool", "Silk"])}),
            ("run.create", thing, create),
            ("run.edit", thing, written(chance.randint(1, 3))),
            ("run.becomes", thing, {"status": chance.choice(["training", "paused"]), "epoch": n, "at": AT}),
            ("run.extend", thing, {"tokens": n + 1}),
            ("pause.start", digest(str(n)), {"at": AT}),
            ("pause.end", digest(str(n)), {}),
            ("credit.receipt", f"{thing}:{digest(str(n))}:{'a' * 16}",
             {"day": f"2026-01-0{n + 1}", "first": n + 1, "last": n + 4, "tokens": 40}),
        ])  # fmt: skip
        clock += chance.random()
        made = mirror.append(type, which, said, at=clock)
        if type == "person.ban":
            bans.append(open_event(made).id)
    return mirrors, kept


@pytest.mark.django_db
@given(st.integers(0, 1 << 32))
@settings(max_examples=examples(3, 20), deadline=None, derandomize=True)
def test_three_mirrors_converge_to_equal_rows_and_hash_in_any_order(seed):
    mirrors, kept = happenings(Random(seed))
    events = [event for mirror in mirrors for event in mirror.events]
    with transaction.atomic():
        first = rebuild_in_random_order(events, kept, seed)
        assert first[1] != "0" * 64
        for n in (1, 2):
            assert rebuild_in_random_order(events, kept, seed + n) == first
        transaction.set_rollback(True)
