"""Test that every change of a replicated row is an event, and that events rebuild the rows."""

import json
import re
from dataclasses import replace
from datetime import date

import pytest
from allauth.mfa.models import Authenticator
from django.contrib.auth.hashers import make_password
from django.utils import timezone
from helpers.contract.event_shapes import describe_events
from helpers.mirrors.event_log_builder import LogBuilder
from helpers.mirrors.mirror_lists import list_entry, signed_list
from helpers.mirrors.rebuild_site import (
    LOG,
    all_events,
    all_private_data,
    rebuild_in_one_batch,
    rebuild_in_random_order,
    replicated_rows,
)
from helpers.paths import ROOT
from helpers.site.checkpoint_views import build_checkpoint
from helpers.site.enrolment_requests import ABOUT, enrolment_request
from helpers.site.second_factor import add_authenticator_app

from barnraise.protocol.evaluation import PreviewDocument, PublishedTexts, TaskFile, TaskScore
from barnraise.protocol.signing import Identity, digest
from coordinator.accounts import credential_sync
from coordinator.accounts.deletion import delete_account
from coordinator.accounts.models import Enrolment, Machine, Team, User
from coordinator.credit import attestations, tasks
from coordinator.credit.models import Credit
from coordinator.eventlog import ingest, private_data, projection
from coordinator.eventlog.models import Aggregate, LogEvent, PrivateData
from coordinator.eventlog.truncate import truncate_log
from coordinator.eventlog.writer import record_existing_rows
from coordinator.fleet.models import MachinePause, VerdictRecord
from coordinator.fleet.verdict_requests import RetractionRequest
from coordinator.lib import site_identity
from coordinator.replication import mirror_list
from coordinator.runs.join_policy import JoinPolicy
from coordinator.runs.models import PublishedText, Run
from coordinator.runs.spec_form import spec_from_fields
from coordinator.telemetry import checkpoints
from coordinator.telemetry.rollup import drain_queue
from coordinator.telemetry.task_scores import record_score


@pytest.fixture
def rebuilt_rows():
    """Return a function that rebuilds the site from its log and checks that nothing changed.

    It takes event types that the log must contain, and returns the replicated rows.
    """

    def rebuild(*event_types: str) -> dict:
        recorded = set(LogEvent.objects.values_list("type", flat=True))
        assert recorded >= set(event_types), f"no event {set(event_types) - recorded}"
        assert not Aggregate.objects.filter(projected=False).exists()
        rows = replicated_rows()
        state_hash = projection.state_hash()
        private_records = all_private_data()
        events = all_events()
        for seed in range(2):
            rebuilt, rebuilt_hash = rebuild_in_random_order(events, private_records, seed)
            assert rebuilt == rows
            assert rebuilt_hash == state_hash
        assert rebuild_in_one_batch(events, private_records) == (rows, state_hash)
        assert not Aggregate.objects.filter(projected=False).exists()
        return rows

    return rebuild


# ---- people


def test_events_of_the_release_lose_no_type_and_no_field():
    """Logs hold them for ever: what is renamed needs an alias at reading, which goes in here."""
    released = json.loads((ROOT / "tests/contract/released_events.json").read_text())
    current = describe_events()
    assert set(released) <= set(current)
    lost = {name: {*released[name].split()} - {*current[name].split()} for name in released}
    assert not any(lost.values()), lost


def test_people_rights_and_names_are_rebuilt(person, rebuilt_rows):
    root = person("root@example.org", is_staff=True, is_superuser=True)
    ada, bob = person(), person("bob@example.org", name="Bob")
    ada.rename("Ada")
    ada.grant("organiser", root)
    add_authenticator_app(bob)
    bob.grant("is_staff", root)
    bob.grant("is_staff", root, False)
    bob.set_password("another-barn-7")
    bob.save()
    rows = rebuilt_rows("person.join", "person.change_profile", "person.change_right")
    assert [row["name"] for row in rows["User"]] == ["", "Ada", "Bob"]
    assert User.objects.get(pk=bob.pk).check_password("another-barn-7")


def test_bans_and_unbans_are_rebuilt(person, volunteer, rebuilt_rows):
    root = person("root@example.org", is_staff=True, is_superuser=True)
    ada, bob = person(), person("bob@example.org")
    volunteer(ada)
    for user in (ada, bob):
        assert user.ban(root, "spam")
    assert bob.unban(root)
    rows = rebuilt_rows("person.ban", "person.unban", "machine.revoke")
    assert [row["is_active"] for row in rows["User"]] == [True, False, True]


def test_deleted_account_is_erased_at_a_mirror_that_knew_it(person, volunteer, draft, rebuilt_rows):
    ada, bob = person(name="Ada Lovelace"), person("bob@example.org")
    team = Team.create("Weavers", ada)
    team.add_member(bob, ada)
    volunteer(ada, 1)
    draft(ada, "Secret plans")
    other_mirror = all_events(), all_private_data()
    delete_account(ada, ada)
    rebuilt_rows("person.leave", "team.leave", "team.promote", "run.delete", "machine.describe")
    assert not PrivateData.objects.filter(body__contains="Lovelace").exists()
    events = all_events()
    rebuild_in_random_order(*other_mirror)  # a mirror that knew her before she left
    assert User.objects.get(pk=ada.pk).name == "Ada Lovelace"
    assert Run.objects.get().name == "Secret plans"
    ingest.ingest_events(events)
    erased = User.objects.get(pk=ada.pk)
    assert erased.name == ""
    assert erased.email.endswith("@left.invalid")
    assert erased.left
    assert not erased.is_active
    assert not Run.objects.exists() and Machine.objects.get().hostname == ""
    assert not PrivateData.objects.filter(body__contains="Lovelace").exists()


def test_events_contain_no_personal_data(person, volunteer, draft):
    ada = person("ada@example.org", name="Ada Lovelace")
    volunteer(ada).machine.rename("adas-attic")
    run = draft(ada, "Secret plans")
    run.edit("Secret planes", run.spec, actor=ada)
    assert run.slug == "secret-planes"
    ada.ban(person("r@example.org", is_superuser=True, is_staff=True), "for Ada's own good")
    bodies = "".join(LogEvent.objects.values_list("body", flat=True))
    states = "".join(Aggregate.objects.values_list("state", flat=True))
    for secret in ("ada@", "Ada", "attic", "ecret", ada.password, "good"):
        assert secret not in bodies + states


# ---- machines and teams


def test_machines_are_rebuilt(person, volunteer, rebuilt_rows):
    ada = person()
    one, other = volunteer(ada, 1), volunteer(ada, 2)
    one.machine.rename("the attic")
    other.machine.revoke(actor=ada, reason="sold")
    third = volunteer(ada, 3).machine
    third.revoke(actor=ada, reason="a mistake")
    third.reinstate(actor=ada)
    rows = rebuilt_rows("machine.enrol", "machine.describe", "machine.revoke", "machine.reinstate")
    assert sorted(row["hostname"] for row in rows["Machine"]) == ["pc-2", "pc-3", "the attic"]


def test_machine_enrolled_through_a_code_is_rebuilt(person, rebuilt_rows):
    ada = person()
    identity = Identity(b"7" * 32)
    for about in (ABOUT, ABOUT.model_copy(update={"cores": 16})):
        Enrolment.open(enrolment_request(identity, machine=about)).approve(ada)
    assert rebuilt_rows("machine.enrol", "machine.describe")["Machine"][0]["cores"] == 16


def test_teams_are_rebuilt(person, rebuilt_rows):
    ada, bob, eve = person(), person("bob@example.org"), person("eve@example.org")
    weavers, gone = Team.create("Weavers", ada), Team.create("Gone", eve)
    weavers.add_member(bob, ada)
    weavers.add_member(eve, ada)
    weavers.rename("Wool weavers", ada)
    weavers.remove_member(ada, ada)
    weavers.add_member(ada, bob)
    weavers.promote(eve, bob)
    gone.remove_member(eve, eve)
    rows = rebuilt_rows(
        "team.create", "team.join", "team.rename", "team.leave", "team.promote", "team.disband"
    )
    assert [(row["name"], row["slug"]) for row in rows["Team"]] == [("Wool weavers", "weavers")]
    assert {row["person_id"]: row["leads"] for row in rows["TeamMember"]} == {
        bob.pk: True,
        eve.pk: True,
        ada.pk: False,
    }


# ---- runs


def test_run_is_rebuilt_after_its_whole_life_cycle(person, launched_run, rebuilt_rows):
    ada = person()
    team = Team.create("Weavers", ada)
    run, _ = launched_run(
        ada, join_policy=JoinPolicy(access="team", team=team.pk, min_memory=1 << 30)
    )
    run.pause(actor=ada)
    run.resume(actor=ada)
    run.extend(5_000, actor=ada)
    run.extend(2_000, actor=ada)
    run.update_join_policy(JoinPolicy(min_device_memory=1 << 31, notes="hello"), actor=ada)
    run.pause(actor=ada)
    run.resume(actor=ada)
    run.finish(actor=ada)
    run.archive(actor=ada)
    run.clone(ada)
    types = [
        "create",
        "request_launch",
        "post_manifest",
        "launch",
        "change_status",
        "extend",
        "set_join_policy",
        "archive",
    ]
    rows = rebuilt_rows(*(f"run.{name}" for name in types))
    first = rows["Run"][0]
    assert (first["status"], first["extra_tokens"]) == ("finished", 7_000)
    assert first["archived"]
    assert first["started"]


def test_draft_and_its_edits_are_rebuilt(person, draft, manifest, volunteer, rebuilt_rows):
    ada = person()
    run = draft(ada)
    machine = volunteer(ada)
    assert machine.post_manifest(run, manifest(run)).status_code == 200
    run.refresh_from_db()
    run.edit("Another name", run.spec, actor=ada)  # the manifest remains
    draft(ada).cancel(actor=ada)
    other = draft(ada, "A third")
    assert machine.post_manifest(other, manifest(other)).status_code == 200
    other.refresh_from_db()
    longer = spec_from_fields({"recipe.token_budget": 100_000, "seed": 7, "model.context": 64})
    assert other.edit("A third", longer, actor=ada)  # the manifest no longer fits
    rows = rebuilt_rows("run.edit", "run.post_manifest")["Run"]
    assert [bool(row["manifest"]) for row in rows] == [True, False, False]
    assert rows[0]["slug"] == "another-name"


def test_unarchived_run_is_rebuilt(person, draft, rebuilt_rows):
    ada = person()
    run = draft(ada)
    run.cancel(actor=ada)
    run.archive(actor=ada)
    run.unarchive(actor=ada)
    assert rebuilt_rows("run.archive")["Run"][0]["archived"] is None


def test_verdicts_are_rebuilt(person, launched_run, numbered_report, rebuilt_rows):
    ada = person()
    run, machine = launched_run(ada)
    assert machine.report(run, numbered_report(1)).status_code == 200
    drain_queue()
    author = f"{machine.identity.key}.{'a' * 16}"
    issued = VerdictRecord.issue(run, [RetractionRequest(author, first=1)], "nonsense", actor=ada)
    rows = rebuilt_rows("verdict.give")["VerdictRecord"]
    assert [row["proven"] for row in rows] == [True]
    assert VerdictRecord.objects.get().signed_verdict == issued.signed_verdict


def test_published_texts_and_scores_are_rebuilt(person, launched_run, rebuilt_rows):
    run, volunteer = launched_run(person())
    for text in ("First", "Second"):
        tasks = TaskFile(text=json.dumps({"question": text, "choices": ["a", "b"], "answer": 0}))
        preview = [PreviewDocument(text=text)]
        PublishedText.publish(run, PublishedTexts(tasks=tasks, preview=preview))
    for correct in (1, 0):
        named = digest(PublishedText.objects.get().tasks)
        score = TaskScore(tasks=named, tokens=500, correct=correct, count=1)
        record_score(run, volunteer.machine, score)
    rows = rebuilt_rows("published.set", "score.record")
    assert rows["PublishedText"][0]["preview"] == ["Second"]
    assert [row["correct"] for row in rows["RecordedScore"]] == [0]
    PublishedText.delete_all_of(run.owner)
    assert rebuilt_rows("published.clear")["PublishedText"] == []


def test_machine_pauses_are_rebuilt(person, volunteer, rebuilt_rows):
    ada = person()
    one, other = volunteer(ada, 1).machine, volunteer(ada, 2).machine
    MachinePause.start(one, actor=ada)
    MachinePause.start(other, actor=ada)
    MachinePause.end(other, actor=ada)
    assert [
        row["machine_id"] for row in rebuilt_rows("pause.start", "pause.end")["MachinePause"]
    ] == [one.pk]


# ---- what follows from reports


@pytest.fixture
def joined_run(person, launched_run, strangers):
    """Return a run and the machines of Ada and Bob, which joined it."""
    run, ada = launched_run(person(name="Ada"))
    (bob,) = strangers(run, 3)
    return run, ada, bob


def earn_credit(run, machine, witness, day: int, updates: tuple[int, int], tokens: int) -> None:
    """Record credit for a range of updates as `record_attestations` does."""
    row = Credit(
        run=run,
        machine=machine.machine,
        incarnation="a" * 16,
        day=date(2026, 1, day),
        first=updates[0],
        last=updates[1],
        tokens=tokens,
        witness=witness.machine,
    )
    attestations.extend_ranges([row])


def test_reports_write_no_events(joined_run, numbered_report):
    run, ada, bob = joined_run
    before = LogEvent.objects.count()
    view = build_checkpoint(vector="a" * 64, digest="c" * 64)
    for seq in range(1, 6):
        ada.report(run, numbered_report(seq, checkpoint=view))
        bob.report(run, numbered_report(seq))
    drain_queue()
    assert LogEvent.objects.count() == before
    assert tasks.record_events() == 2  # a checkpoint and its holders
    assert tasks.record_events() == 0
    for seq in range(6, 9):
        ada.report(run, numbered_report(seq, checkpoint=view))
    drain_queue()
    assert tasks.record_events() == 0


def test_checkpoints_and_their_holders_are_rebuilt(joined_run, numbered_report, rebuilt_rows):
    run, ada, bob = joined_run
    view = build_checkpoint(vector="a" * 64, digest="c" * 64)
    ada.store_reports(run, numbered_report(1, checkpoint=view))
    tasks.record_events()
    bob.store_reports(run, numbered_report(1, vector="a" * 64, anchor="c" * 64))
    tasks.record_events()
    rows = rebuilt_rows("checkpoint.announce", "checkpoint.confirm")
    assert len(rows["Checkpoint"]) == 1 and len(rows["CheckpointHolder"]) == 2


def test_deleted_checkpoint_is_not_rebuilt(joined_run, numbered_report, rebuilt_rows, monkeypatch):
    run, ada, _ = joined_run
    view = build_checkpoint(vector="a" * 64, digest="c" * 64)
    ada.store_reports(run, numbered_report(1, checkpoint=view))
    tasks.record_events()
    monkeypatch.setattr(checkpoints, "MAX_CHECKPOINTS", 0)
    assert checkpoints.prune_checkpoints(run) == 1
    assert rebuilt_rows("checkpoint.delete")["Checkpoint"] == []


def test_credit_is_rebuilt(joined_run, rebuilt_rows):
    run, ada, bob = joined_run
    earn_credit(run, ada, bob, day=1, updates=(1, 4), tokens=400)
    assert tasks.record_events() == 1
    earn_credit(run, ada, bob, day=1, updates=(5, 6), tokens=150)
    earn_credit(run, ada, bob, day=2, updates=(7, 7), tokens=90)
    assert tasks.record_events() == 2 and tasks.record_events() == 0
    rows = rebuilt_rows("credit.receipt")["Credit"]
    assert [(row["first"], row["last"], row["tokens"]) for row in rows] == [(1, 6, 550), (7, 7, 90)]


def test_updates_attested_at_two_mirrors_count_once(joined_run):
    run, ada, bob = joined_run
    credit_name = f"{run.pk}:{ada.identity.key}:{'a' * 16}"
    earn_credit(run, ada, bob, day=1, updates=(1, 4), tokens=400)
    tasks.record_events()
    # Not yet recorded as an event when the other mirror's receipts arrive.
    earn_credit(run, ada, bob, day=1, updates=(5, 8), tokens=400)
    other = LogBuilder()
    for first, last, tokens in ((1, 6, 600), (3, 4, 200), (7, 12, 600)):
        payload = {
            "day": "2026-01-01",
            "first": first,
            "last": last,
            "tokens": tokens,
            "witness": bob.identity.key,
        }
        other.append("credit.receipt", credit_name, payload)
    ingest.ingest_events(other.events)
    row = Credit.objects.get()
    assert (row.first, row.last, row.tokens) == (1, 12, 1200)
    assert tasks.record_events() == 0
    both = replicated_rows(), projection.state_hash()
    assert rebuild_in_random_order(all_events(), all_private_data()) == both


# ---- events of other mirrors


def test_private_data_must_match_its_digest_and_shape(person):
    ada = person(name="Ada")
    events = all_events()
    private_records = all_private_data()
    rebuild_in_random_order(events, [])
    [wanted] = private_data.missing_digests()
    assert User.objects.get(pk=ada.pk).name == ""
    wrong = [replace(private_records[0], body="{}"), replace(private_records[0], digest="1" * 64)]
    assert private_data.ingest(wrong) == 0 and private_data.missing_digests() == [wanted]
    assert private_data.ingest(private_records) == 1 and User.objects.get(pk=ada.pk).name == "Ada"
    assert private_data.missing_digests() == [] and private_data.ingest(private_records) == 0
    other = LogBuilder()
    evil = json.dumps({"name": "x", "email": "x", "password": "y", "is_superuser": True})
    content_digest = digest("0" * 32 + evil)
    payload = {
        "content_digest": content_digest,
        "joined": ada.date_joined.isoformat(),
        "is_staff": True,
    }
    other.append("person.join", "01890000-0000-7000-8000-000000000001", payload)
    ingest.ingest_events(other.events)
    assert private_data.ingest([private_data.PrivateRecord(content_digest, "0" * 32, evil)]) == 1
    intruder = User.objects.get(pk="01890000-0000-7000-8000-000000000001")
    assert not intruder.is_superuser and not intruder.is_staff


def test_hostile_texts_reach_no_row(db):
    """Ingest malformed private data from a listed mirror, which may have been compromised."""
    other = LogBuilder()
    evil = {"name": "x\0", "email": "a\0@b", "password": "!\0"}
    records = [evil, evil | {"name": "\u202e", "email": "a@b"}, {"email": 7}, []]
    for n, record in enumerate(records):
        body = json.dumps(record)
        content_digest = digest("0" * 32 + body)
        payload = {"content_digest": content_digest, "joined": "2026-01-01T00:00:00Z"}
        other.append("person.join", f"01890000-0000-7000-8000-00000000000{n}", payload)
        ingest.ingest_events(other.events)
        private_data.ingest([private_data.PrivateRecord(content_digest, "0" * 32, body)])
    assert {row["name"] for row in replicated_rows()["User"]} == {""} and User.objects.count() == 4
    assert not Aggregate.objects.filter(projected=False).exists()


def test_site_older_than_its_log_records_its_rows(person, launched_run, rebuilt_rows):
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
    assert rebuilt_rows("run.create", "run.change_status", "team.join") == before


def test_events_of_an_expelled_mirror_are_undone(person):
    ada = person()
    before = replicated_rows(), projection.state_hash()
    other = LogBuilder()
    other.append("person.change_right", ada.pk, {"right": "organiser", "given": True})
    ingest.ingest_events(other.events)
    assert User.objects.get().organiser
    truncate_log(other.origin, 1, "expelled")
    assert replicated_rows() == before[0]
    assert re.fullmatch("[0-9a-f]{64}", projection.state_hash())


def test_run_that_a_rogue_mirror_cancelled_goes_on_once_it_is_expelled(adas_run):
    run, _ = adas_run
    run.refresh_from_db()
    status = run.status
    rogue = LogBuilder()
    payload = {"status": "cancelled", "epoch": 0, "at": timezone.now().isoformat()}
    rogue.append("run.change_status", run.pk, payload)
    ingest.ingest_events(rogue.events)
    run.refresh_from_db()
    assert run.status == "cancelled"
    truncate_log(rogue.origin, 1, "expelled")
    run.refresh_from_db()
    assert run.status == status != "cancelled" and run.finished is None


# ---- a dishonest mirror


def append_private(log: LogBuilder, event_type: str, name: object, content: dict, **payload):
    """Append an event of another mirror that names private data, and return its record."""
    body = json.dumps(content)
    content_digest = digest("5" * 32 + body)
    log.append(event_type, name, {"content_digest": content_digest, **payload})
    return private_data.PrivateRecord(content_digest, "5" * 32, body)


def test_rogue_mirror_makes_nobody_staff_and_sets_no_password(person):
    root = person("root@example.org", is_staff=True, is_superuser=True)
    ada = person("ada@example.org")
    for user in (root, ada):
        user.set_password("own-barn-7")
        user.save()
    rogue = LogBuilder()
    password = make_password("rogue-barn-7")
    records = [
        append_private(
            rogue,
            "person.change_profile",
            user.pk,
            {"name": "taken", "email": f"rogue{n}@example.org", "password": password},
        )
        for n, user in enumerate((root, ada))
    ]
    rogue.append("person.change_right", ada.pk, {"right": "is_staff", "given": True})
    ingest.ingest_events(rogue.events)
    private_data.ingest(records)
    for user in (root, ada):
        user.refresh_from_db()
        assert user.check_password("own-barn-7") and user.name != "taken"
        assert not user.email.startswith("rogue")
    assert root.is_superuser and root.is_staff and not ada.is_staff
    replicated = User.objects.get(pk=ada.pk)
    projection.rebuild()
    replicated.refresh_from_db()
    assert replicated.check_password("own-barn-7")


def test_rogue_mirror_takes_over_nobody_who_joined_elsewhere(db):
    """At this site the person never signed in: the record of the mirror where she joined counts."""
    home, rogue = LogBuilder(61), LogBuilder(62)
    eve = "01890000-0000-7000-8000-0000000000ee"
    profile = {"name": "Eve", "email": "eve@example.org", "password": make_password("own-barn-7")}
    joined = append_private(home, "person.join", eve, profile, joined="2026-01-01T00:00:00Z")
    forged = profile | {"password": make_password("rogue-barn-7")}
    stolen = append_private(rogue, "person.change_profile", eve, forged)
    for log in (home, rogue):
        ingest.ingest_events(log.events)
    private_data.ingest([joined, stolen])
    assert User.objects.get(pk=eve).check_password("own-barn-7")
    changed = profile | {"password": make_password("new-barn-7")}
    later = append_private(home, "person.change_profile", eve, changed)
    ingest.ingest_events(home.events)
    private_data.ingest([later])
    assert User.objects.get(pk=eve).check_password("new-barn-7")

    # Once she has signed in here, changes need her confirmation here: even those of her mirror.
    credential_sync.record_credentials(User.objects.get(pk=eve).pk)
    another = append_private(home, "person.change_profile", eve, forged)
    ingest.ingest_events(home.events)
    private_data.ingest([another])
    assert User.objects.get(pk=eve).check_password("new-barn-7")


def test_rogue_mirror_neither_bans_nor_revokes_alone(person, volunteer):
    ada = person()
    machine = volunteer(ada).machine
    rogues = [LogBuilder(71), LogBuilder(72)]
    own = site_identity.identity()
    entries = [
        list_entry(identity, f"https://{identity.key[:8]}.example.org")
        for identity in (own, *(rogue.identity for rogue in rogues), Identity(b"4" * 32))
    ]
    first = signed_list(1, *entries)
    mirror_list.ingest_lists([first], first.digest)
    for count, rogue in enumerate(rogues, 1):
        rogue.append("person.ban", ada.pk, {"at": ada.date_joined.isoformat()})
        rogue.append("machine.revoke", machine.key, {"at": ada.date_joined.isoformat()})
        ingest.ingest_events(rogue.events)
        ada.refresh_from_db()
        machine.refresh_from_db()
        assert ada.is_active == (machine.revoked is None) == (count < 2), "half of four bind all"


def test_rogue_mirror_reinstates_no_machine(person, volunteer):
    machine = volunteer(person()).machine
    rogue = LogBuilder(71)
    own = site_identity.identity()
    entries = [
        list_entry(identity, f"https://{identity.key[:8]}.example.org")
        for identity in (own, rogue.identity, Identity(b"3" * 32), Identity(b"4" * 32))
    ]
    first = signed_list(1, *entries)
    mirror_list.ingest_lists([first], first.digest)
    machine.revoke(reason="noise")
    rogue.append("machine.reinstate", machine.key, {})
    ingest.ingest_events(rogue.events)
    machine.refresh_from_db()
    assert machine.revoked, "only this site ends what it decided"
    assert machine.reinstate() and machine.revoked is None
    projection.rebuild()
    machine.refresh_from_db()
    assert machine.revoked is None


def test_rogue_mirror_neither_adds_nor_removes_a_second_factor(person):
    ada = person()
    totp = Authenticator.objects.create(user=ada, type="totp", data={"secret": "A" * 32})
    rogue = LogBuilder()
    rogue.append("access.remove_factors", ada.pk, {"factors": [totp.data["id"]]})
    secret = {"created": 1.0, "secret": "B" * 32}
    record = append_private(
        rogue,
        "access.add_factor",
        ada.pk,
        secret,
        factor="01890000-0000-7000-8000-00000000000f",
        type="totp",
    )
    ingest.ingest_events(rogue.events)
    private_data.ingest([record])
    assert [row.data["secret"] for row in Authenticator.objects.filter(user=ada)] == ["A" * 32]
    projection.rebuild()
    assert [row.data["secret"] for row in Authenticator.objects.filter(user=ada)] == ["A" * 32]
