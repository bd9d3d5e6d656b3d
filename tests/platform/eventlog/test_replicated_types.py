"""What mirrors share: each change of a row is an event, and the events alone give the same rows again."""

import json
import re
from dataclasses import replace
from datetime import date

import pytest
from helpers.event_log_builder import LogBuilder
from helpers.rebuild_site import (
    LOG,
    all_events,
    all_private_data,
    rebuild_in_one_batch,
    rebuild_in_random_order,
    replicated_rows,
)

from barnraise.protocol import coordinator_messages, reports
from barnraise.protocol.signing import Identity, digest
from coordinator.accounts.deletion import delete_account
from coordinator.accounts.models import Enrolment, Machine, Team, User
from coordinator.credit import attestations, tasks
from coordinator.credit.models import Credit
from coordinator.eventlog import ingest, private_data, projection
from coordinator.eventlog.models import Aggregate, LogEvent, PrivateData
from coordinator.eventlog.truncate import truncate_log
from coordinator.eventlog.writer import record_existing_rows
from coordinator.fleet.models import MachinePause, VerdictRecord
from coordinator.fleet.verdicts import RetractionRequest
from coordinator.runs.join_policy import JoinPolicy
from coordinator.runs.models import Run
from coordinator.runs.spec_form import spec_from_fields
from coordinator.telemetry import checkpoints
from coordinator.telemetry.rollup import drain_queue


@pytest.fixture
def proven():
    """Calls for a second site built from the log alone: the same rows and the same hash as here."""

    def prove(*types: str) -> dict:
        said = set(LogEvent.objects.values_list("type", flat=True))
        assert said >= set(types), f"nothing told of {set(types) - said}"
        assert not Aggregate.objects.filter(projected=False).exists()
        here, known, kept, events = (
            replicated_rows(),
            projection.state_hash(),
            all_private_data(),
            all_events(),
        )
        for seed in range(2):
            there, found = rebuild_in_random_order(events, kept, seed)
            assert there == here
            assert found == known
        assert rebuild_in_one_batch(events, kept) == (here, known)
        assert not Aggregate.objects.filter(projected=False).exists()
        return here

    return prove


# ---- people ---------------------------------------------------------------------------------------------------------


def test_people_their_rights_and_their_names_are_the_same_elsewhere(person, proven):
    root = person("root@example.org", is_staff=True, is_superuser=True)
    ada, bob = person(), person("bob@example.org", name="Bob")
    ada.rename("Ada")
    ada.grant("organiser", root)
    bob.grant("is_staff", root)
    bob.grant("is_staff", root, False)
    bob.set_password("another-barn-7")
    bob.save()
    here = proven("person.join", "person.about", "person.grant")
    assert [row["name"] for row in here["User"]] == ["", "Ada", "Bob"]
    assert User.objects.get(pk=bob.pk).check_password("another-barn-7")


def test_bans_and_their_end_are_the_same_elsewhere(person, volunteer, proven):
    root = person("root@example.org", is_staff=True, is_superuser=True)
    ada, bob = person(), person("bob@example.org")
    volunteer(ada)
    for who in (ada, bob):
        assert who.ban(root, "spam")
    assert bob.unban(root)
    here = proven("person.ban", "person.unban", "machine.revoke")
    assert [row["is_active"] for row in here["User"]] == [True, False, True]


def test_who_left_is_nobody_elsewhere_too(person, volunteer, draft, proven):
    ada, bob = person(name="Ada Lovelace"), person("bob@example.org")
    team = Team.create("Weavers", ada)
    team.add_member(bob, ada)
    volunteer(ada, 1)
    draft(ada, "Secret plans")
    elsewhere = all_events(), all_private_data()
    delete_account(ada, ada)
    proven("person.leave", "team.part", "team.promote", "run.forget", "machine.about")
    assert not PrivateData.objects.filter(body__contains="Lovelace").exists()
    events = all_events()
    rebuild_in_random_order(*elsewhere)  # a mirror that knew her, and hears that she left
    assert (
        User.objects.get(pk=ada.pk).name == "Ada Lovelace"
        and Run.objects.get().name == "Secret plans"
    )
    ingest.ingest_events(events)
    gone = User.objects.get(pk=ada.pk)
    assert (
        gone.name == ""
        and gone.email.endswith("@left.invalid")
        and gone.left
        and not gone.is_active
    )
    assert not Run.objects.exists() and Machine.objects.get().hostname == ""
    assert not PrivateData.objects.filter(body__contains="Lovelace").exists()


def test_nothing_personal_is_in_any_event(person, volunteer, draft):
    ada = person("ada@example.org", name="Ada Lovelace")
    volunteer(ada).machine.rename("adas-attic")
    run = draft(ada, "Secret plans")
    run.edit("Secret planes", run.spec, actor=ada)
    ada.ban(person("r@example.org", is_superuser=True, is_staff=True), "for Ada's own good")
    said = "".join(LogEvent.objects.values_list("body", flat=True)) + "".join(
        Aggregate.objects.values_list("state", flat=True)
    )
    for secret in ("ada@", "Ada", "attic", "ecret", ada.password, "good"):
        assert secret not in said


# ---- machines and teams ---------------------------------------------------------------------------------------------


def test_machines_are_the_same_elsewhere(person, volunteer, proven):
    ada = person()
    one, other = volunteer(ada, 1), volunteer(ada, 2)
    one.machine.rename("the attic")
    other.machine.revoke(actor=ada, reason="sold")
    here = proven("machine.enrol", "machine.about", "machine.revoke")
    assert sorted(row["hostname"] for row in here["Machine"]) == ["pc-2", "the attic"]


def test_a_machine_that_enrolled_through_a_code_is_the_same_elsewhere(person, proven):
    about = coordinator_messages.MachineDescription(
        hostname="barn",
        system="Linux",
        processor="x",
        cores=4,
        memory_bytes=1 << 33,
        accelerator="",
    )
    request = coordinator_messages.EnrolmentRequest(
        key=Identity(b"7" * 32).key, machine=about, mirror="a" * 64, issued=0
    )
    ada = person()
    Enrolment.open(request).approve(ada)
    Enrolment.open(
        request.model_copy(update={"machine": about.model_copy(update={"cores": 8})})
    ).approve(ada)
    assert proven("machine.enrol", "machine.about")["Machine"][0]["cores"] == 8


def test_teams_are_the_same_elsewhere(person, proven):
    ada, bob, eve = person(), person("bob@example.org"), person("eve@example.org")
    weavers, gone = Team.create("Weavers", ada), Team.create("Gone", eve)
    weavers.add_member(bob, ada)
    weavers.add_member(eve, ada)
    weavers.rename("Wool weavers", ada)
    weavers.remove_member(ada, ada)
    weavers.add_member(ada, bob)
    weavers.promote(eve, bob)
    gone.remove_member(eve, eve)
    here = proven(
        "team.found", "team.join", "team.rename", "team.part", "team.promote", "team.disband"
    )
    assert [(row["name"], row["slug"]) for row in here["Team"]] == [("Wool weavers", "weavers")]
    assert {row["person_id"]: row["leads"] for row in here["TeamMember"]} == {
        bob.pk: True,
        eve.pk: True,
        ada.pk: False,
    }


# ---- runs -----------------------------------------------------------------------------------------------------------


def test_a_runs_whole_life_is_the_same_elsewhere(person, launched_run, proven):
    ada = person()
    team = Team.create("Weavers", ada)
    run, _ = launched_run(
        ada, join_policy=JoinPolicy(access="team", team=team.pk, least_memory=1 << 30)
    )
    run.pause(actor=ada)
    run.resume(actor=ada)
    run.extend(5_000, actor=ada)
    run.extend(2_000, actor=ada)
    run.update_join_policy(JoinPolicy(least_device_memory=1 << 31, notes="hello"), actor=ada)
    run.pause(actor=ada)
    run.resume(actor=ada)
    run.finish(actor=ada)
    run.archive(actor=ada)
    run.clone(ada)
    types = ["create", "request", "manifest", "launch", "becomes", "extend", "arrange", "archive"]
    here = proven(*(f"run.{name}" for name in types))
    first = here["Run"][0]
    assert (
        (first["status"], first["extra_tokens"]) == ("finished", 7_000)
        and first["archived"]
        and first["started"]
    )


def test_a_draft_and_its_edits_are_the_same_elsewhere(person, draft, manifest, volunteer, proven):
    ada = person()
    run, mine = draft(ada), volunteer(ada)
    signed = mine.identity.sign("manifest", manifest(run))
    assert mine.send_request("POST", f"/runs/{run.slug}/manifest", signed).status_code == 200
    run.refresh_from_db()
    run.edit("Another name", run.spec, actor=ada)  # keeps the manifest
    draft(ada).cancel(actor=ada)
    other = draft(ada, "A third")
    assert (
        mine.send_request(
            "POST", f"/runs/{other.slug}/manifest", mine.identity.sign("manifest", manifest(other))
        ).status_code
        == 200
    )
    other.refresh_from_db()
    longer = spec_from_fields({"recipe.token_budget": 100_000, "seed": 7, "model.context": 64})
    assert other.edit("A third", longer, actor=ada)  # takes it away
    here = proven("run.edit", "run.manifest")["Run"]
    assert [bool(row["manifest"]) for row in here] == [True, False, False]
    assert here[0]["slug"] == "a-run"


def test_an_archived_run_comes_back_everywhere(person, draft, proven):
    ada = person()
    run = draft(ada)
    run.cancel(actor=ada)
    run.archive(actor=ada)
    run.unarchive(actor=ada)
    assert proven("run.archive")["Run"][0]["archived"] is None


def test_two_mirrors_that_gave_one_slug_away_agree_who_keeps_it(person, draft):
    """The second mirror is this same site, which took in the first's log after it was emptied."""
    ada = person()
    events, kept = all_events(), all_private_data()
    first = draft(ada, "Barn")
    slugs = {first.pk: "barn"}
    theirs, more = all_events(), all_private_data()
    rebuild_in_random_order(events, kept)
    second = draft(User.objects.get(), "Barn")
    assert second.slug == "barn"
    ingest.ingest_events(theirs)
    private_data.ingest(more)
    slugs = {run.pk: run.slug for run in Run.objects.all()}
    assert slugs == {first.pk: "barn", second.pk: f"barn-{second.pk.hex[-8:]}"}
    third = draft(User.objects.get(), "Barn")
    assert third.slug == f"barn-{third.pk.hex[-8:]}"
    both = replicated_rows(), projection.state_hash()
    for seed in range(3):
        assert rebuild_in_random_order(all_events(), all_private_data(), seed) == both


def test_what_is_taken_out_of_a_run_is_the_same_elsewhere(
    person, launched_run, numbered_report, proven
):
    ada = person()
    run, mine = launched_run(ada)
    assert mine.report(run, numbered_report(1)).status_code == 200
    drain_queue()
    author = f"{mine.identity.key}.{'a' * 16}"
    given = VerdictRecord.issue(run, [RetractionRequest(author, first=1)], "nonsense", actor=ada)
    here = proven("verdict.give")["VerdictRecord"]
    assert [row["proven"] for row in here] == [
        True
    ] and VerdictRecord.objects.get().signed_verdict == given.signed_verdict


def test_a_machine_rests_whichever_mirror_it_reports_to(person, volunteer, proven):
    ada = person()
    one, other = volunteer(ada, 1).machine, volunteer(ada, 2).machine
    MachinePause.start(one, actor=ada)
    MachinePause.start(other, actor=ada)
    MachinePause.end(other, actor=ada)
    assert [row["machine_id"] for row in proven("pause.start", "pause.end")["MachinePause"]] == [
        one.pk
    ]


# ---- what reports say -----------------------------------------------------------------------------------------------


@pytest.fixture
def barn(person, launched_run, volunteer):
    """(run, ada's machine, bob's), both in it."""
    run, ada = launched_run(person(name="Ada"))
    bob = volunteer(person("bob@example.org"), 3)
    bob.join(run)
    return run, ada, bob


def earned(run, machine, witness, day: int, first: int, last: int, tokens: int) -> None:
    """Add it as `record_attestations` does."""
    row = Credit(run=run, machine=machine.machine, incarnation="a" * 16, day=date(2026, 1, day), first=first, last=last,
                 tokens=tokens, witness=witness.machine)  # fmt: skip
    attestations._extend_ranges([row])


def test_reports_write_no_events(barn, numbered_report):
    run, ada, bob = barn
    before = LogEvent.objects.count()
    view = reports.CheckpointView(
        tokens=60, vector="a" * 64, digest="c" * 64, checksum="0" * 16, size=1
    )
    for seq in range(1, 6):
        ada.report(run, numbered_report(seq, checkpoint=view))
        bob.report(run, numbered_report(seq))
    drain_queue()
    assert LogEvent.objects.count() == before
    assert (
        tasks.record_events() == 2 and tasks.record_events() == 0
    )  # a checkpoint, and who holds it
    for seq in range(6, 9):
        ada.report(run, numbered_report(seq, checkpoint=view))
    drain_queue()
    assert tasks.record_events() == 0


def test_checkpoints_and_who_holds_them_are_the_same_elsewhere(barn, numbered_report, proven):
    run, ada, bob = barn
    view = reports.CheckpointView(
        tokens=60, vector="a" * 64, digest="c" * 64, checksum="0" * 16, size=1
    )
    ada.report(run, numbered_report(1, checkpoint=view))
    drain_queue()
    tasks.record_events()
    bob.report(run, numbered_report(1, vector="a" * 64, anchor="c" * 64))
    drain_queue()
    tasks.record_events()
    here = proven("checkpoint.announce", "checkpoint.hold")
    assert len(here["Checkpoint"]) == 1 and len(here["CheckpointHolder"]) == 2


def test_a_checkpoint_that_was_forgotten_is_gone_elsewhere_too(
    barn, numbered_report, proven, monkeypatch
):
    run, ada, _ = barn
    view = reports.CheckpointView(
        tokens=60, vector="a" * 64, digest="c" * 64, checksum="0" * 16, size=1
    )
    ada.report(run, numbered_report(1, checkpoint=view))
    drain_queue()
    tasks.record_events()
    monkeypatch.setattr(checkpoints, "MAX_CHECKPOINTS", 0)
    assert checkpoints.prune_checkpoints(run) == 2
    assert proven("checkpoint.forget")["Checkpoint"] == []


def test_credit_is_the_same_elsewhere(barn, proven):
    run, ada, bob = barn
    earned(run, ada, bob, 1, 1, 4, 400)
    assert tasks.record_events() == 1
    earned(run, ada, bob, 1, 5, 6, 150)
    earned(run, ada, bob, 2, 7, 7, 90)
    assert tasks.record_events() == 2 and tasks.record_events() == 0
    here = proven("credit.receipt")["Credit"]
    assert [(row["first"], row["last"], row["tokens"]) for row in here] == [(1, 6, 550), (7, 7, 90)]


def test_what_two_mirrors_heard_of_the_same_updates_counts_once(barn):
    run, ada, bob = barn
    place = f"{run.pk}:{ada.identity.key}:{'a' * 16}"
    earned(run, ada, bob, 1, 1, 4, 400)
    tasks.record_events()
    earned(
        run, ada, bob, 1, 5, 8, 400
    )  # heard here and not told yet, when the other mirror's receipts come
    other = LogBuilder()
    for first, last, tokens in ((1, 6, 600), (3, 4, 200), (7, 12, 600)):
        said = {
            "day": "2026-01-01",
            "first": first,
            "last": last,
            "tokens": tokens,
            "witness": bob.identity.key,
        }
        other.append("credit.receipt", place, said)
    ingest.ingest_events(other.events)
    row = Credit.objects.get()
    assert (row.first, row.last, row.tokens) == (1, 12, 1200)
    assert tasks.record_events() == 0
    both = replicated_rows(), projection.state_hash()
    assert rebuild_in_random_order(all_events(), all_private_data()) == both


# ---- what comes from others -----------------------------------------------------------------------------------------


def test_particulars_are_only_what_their_digest_says_and_of_their_shape(person):
    ada = person(name="Ada")
    events, kept = all_events(), all_private_data()
    rebuild_in_random_order(events, [])
    [wanted] = private_data.missing_digests()
    assert User.objects.get(pk=ada.pk).name == ""
    wrong = [replace(kept[0], body="{}"), replace(kept[0], digest="1" * 64)]
    assert private_data.ingest(wrong) == 0 and private_data.missing_digests() == [wanted]
    assert private_data.ingest(kept) == 1 and User.objects.get(pk=ada.pk).name == "Ada"
    assert private_data.missing_digests() == [] and private_data.ingest(kept) == 0
    other = LogBuilder()
    evil = json.dumps({"name": "x", "email": "x", "password": "y", "is_superuser": True})
    about = digest("0" * 32 + evil)
    said = {
        "about": about,
        "joined": ada.date_joined.isoformat(),
        "organiser": False,
        "is_staff": False,
    }
    other.append("person.join", "01890000-0000-7000-8000-000000000001", said)
    ingest.ingest_events(other.events)
    assert private_data.ingest([private_data.PrivateRecord(about, "0" * 32, evil)]) == 1
    assert not User.objects.get(pk="01890000-0000-7000-8000-000000000001").is_superuser


def test_hostile_texts_reach_no_row(person):
    """A mirror of the list may be taken over: what it says is of its shape, or is not written."""
    other, evil = LogBuilder(), {"name": "x\0", "email": "a\0@b", "password": "!\0"}
    for n, said in enumerate([evil, evil | {"name": "\u202e", "email": "a@b"}, {"email": 7}, []]):
        body = json.dumps(said)
        about = digest("0" * 32 + body)
        who = {"about": about, "joined": "2026-01-01T00:00:00Z"}
        other.append("person.join", f"01890000-0000-7000-8000-00000000000{n}", who)
        ingest.ingest_events(other.events)
        private_data.ingest([private_data.PrivateRecord(about, "0" * 32, body)])
    assert {row["name"] for row in replicated_rows()["User"]} == {""} and User.objects.count() == 4
    assert not Aggregate.objects.filter(projected=False).exists()


def test_a_site_that_is_older_than_its_log_tells_what_it_holds(person, launched_run, proven):
    ada = person(name="Ada")
    team = Team.create("Weavers", ada)
    team.add_member(person("bob@example.org"), ada)
    run, _ = launched_run(ada)
    run.extend(5, actor=ada)
    run.pause(actor=ada)
    before = replicated_rows()
    for model in LOG:
        model.objects.all().delete()
    assert record_existing_rows() > 5 and record_existing_rows() == 0
    assert proven("run.create", "run.becomes", "team.join") == before


def test_what_an_expelled_mirror_said_is_undone_in_rows(person, draft):
    ada = person()
    before = replicated_rows(), projection.state_hash()
    other = LogBuilder()
    other.append("person.ban", ada.pk, {"at": ada.date_joined.isoformat()})
    ingest.ingest_events(other.events)
    assert not User.objects.get().is_active
    truncate_log(other.origin, 1, "expelled")
    assert replicated_rows() == before[0]
    assert re.fullmatch("[0-9a-f]{64}", projection.state_hash())
