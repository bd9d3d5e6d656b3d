"""Test the audit log: decisions are recorded, staff can search them, nobody can change them."""

import uuid
from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone

from coordinator.audit.log import anonymise, record
from coordinator.audit.models import AuditEntry
from coordinator.audit.tasks import delete_old_entries

pytestmark = pytest.mark.django_db


@pytest.fixture
def staff(person, client) -> Client:
    client.force_login(person("root@example.org", is_staff=True, is_superuser=True))
    return client


def test_audit_entry_names_actor_action_and_subject(person, draft):
    ada = person(name="Ada")
    run = draft(ada, name="Evening shift")
    at = timezone.now()
    other = uuid.uuid4()
    record("run.tested", run, actor=ada, before="draft", when=at, other=other)
    entry = AuditEntry.objects.get(action="run.tested")
    assert (entry.subject_kind, entry.subject_id, entry.subject_name) == (
        "run",
        str(run.pk),
        "Evening shift",
    )
    assert entry.actor == ada and entry.machine is None
    assert entry.detail["before"] == "draft" and entry.detail["other"] == str(other)


def test_anonymous_user_is_recorded_as_no_actor(person, rf):
    from django.contrib.auth.models import AnonymousUser

    record("user.tested", person(), actor=AnonymousUser())
    assert AuditEntry.objects.get(action="user.tested").actor is None


def test_entry_drops_null_bytes_and_truncates_long_texts(person, draft):
    run = draft(person(), name="A run")
    run.name = "\0<b>" + "x" * 5000
    record("run.tested", run, why="\0" * 3 + "y" * 5000, list=["\0", {"\0": "\0"}])
    entry = AuditEntry.objects.get(action="run.tested")
    assert entry.subject_name.startswith("<b>x") and len(entry.subject_name) == 200
    assert entry.detail["why"] == "y" * 1000 and entry.detail["list"] == ["", {"": ""}]


def test_audit_entry_survives_its_subject_and_actor(person):
    ada, bob = person(), person("bob@example.org", name="Bob")
    record("user.tested", bob, actor=ada, reason="spam")
    ada.delete()
    bob.delete()
    entry = AuditEntry.objects.get(action="user.tested")
    assert entry.actor is None and entry.subject_name == "Bob"


def test_redacted_entry_records_only_that_it_happened(person):
    bob, eve = person("bob@example.org", name="Bob"), person("eve@example.org", name="Eve")
    record("user.tested", bob, reason="spam")
    record("user.tested", eve)
    assert anonymise(bob) == 1
    assert list(AuditEntry.objects.order_by("id").values_list("subject_name", "detail")) == [
        ("", {}),
        ("Eve", {}),
    ]
    assert anonymise() == 0


def test_request_id_is_kept_if_valid_and_replaced_otherwise(client, valkey):
    answer = client.get("/", headers={"X-Request-ID": "a-workers-own-1"})
    assert answer["X-Request-ID"] == "a-workers-own-1"
    for wrong in ("short", "x" * 65, "new\nline-in-it", "<script>alert()</script>"):
        assigned = client.get("/", headers={"X-Request-ID": wrong})["X-Request-ID"]
        assert assigned != wrong and len(assigned) == 32


def test_staff_can_search_the_audit_log(staff, person, draft):
    run = draft(person(), name="Evening shift")
    record("run.tested", run, reason="<script>alert(1)</script>")
    entry = AuditEntry.objects.get(action="run.tested")
    page = staff.get("/admin/audit/auditentry/", {"q": "Evening"}).content.decode()
    assert "run.tested" in page and "<script>alert(1)" not in page
    empty = staff.get("/admin/audit/auditentry/", {"q": "nothing of the kind"}).content.decode()
    assert "run.tested" not in empty
    entry_path = f"/admin/audit/auditentry/{entry.pk}/"
    assert "&lt;script&gt;alert(1)" in staff.get(f"{entry_path}change/").content.decode()


def test_audit_entries_are_deleted_at_the_configured_age(person, settings):
    ada = person()
    ages = [0, 30, 729, 731, 4000]
    for days in ages:
        entry = record("user.tested", ada, days=days)
        AuditEntry.objects.filter(pk=entry.pk).update(at=timezone.now() - timedelta(days=days))
    settings.AUDIT_DAYS = 0
    assert delete_old_entries() == 0 and AuditEntry.objects.count() == 5, (
        "entries were deleted although 0 keeps them all"
    )
    settings.AUDIT_DAYS = 730
    assert delete_old_entries() == 2 and delete_old_entries() == 0, (
        "a second run deleted more entries"
    )
    assert sorted(entry.detail["days"] for entry in AuditEntry.objects.all()) == [0, 30, 729]
