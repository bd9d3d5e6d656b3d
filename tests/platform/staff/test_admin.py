"""The staff's door, and what it opens."""

import logging
import re

import pytest
from allauth.account.models import EmailAddress
from django.test import Client

from barnraise.protocol import coordinator_messages, enums
from coordinator.accounts.models import Machine, SiteSettings, Team
from coordinator.audit.models import AuditEntry
from coordinator.lib import embedded_servers
from coordinator.notify.models import Notification
from coordinator.notify.notification_types import NotificationDraft, NotificationType
from coordinator.staff.models import Announcement

pytestmark = pytest.mark.django_db
PASSWORD = "wooden-barn-9"


@pytest.fixture
def staff(person, client) -> Client:
    client.force_login(person("root@example.org", is_staff=True, is_superuser=True))
    return client


def act(client: Client, model: str, action: str, pk: object) -> str:
    answer = client.post(
        f"/admin/{model}/", {"action": action, "_selected_action": str(pk)}, follow=True
    )
    assert answer.status_code == 200
    return " ".join(str(m) for m in answer.context["messages"])


def decide(client: Client, model: str, action: str, pk: object, **fields: str) -> str:
    """By the dialog of a row's own page; what the staff are told."""
    answer = client.post(
        f"/admin/{model}/{pk}/{action}/", {"_form_submitted": "1", **fields}, follow=True
    )
    assert answer.status_code == 200, answer.status_code
    return " ".join(str(m) for m in answer.context["messages"])


def test_staff_pause_resume_and_finish_a_run(staff, person, launched_run):
    run, _ = launched_run(person())
    assert "Paused" in act(staff, "runs/run", "pause_all", run.pk)
    run.refresh_from_db()
    assert run.state is enums.RunStatus.PAUSED
    assert "nothing to pause" in act(staff, "runs/run", "pause_all", run.pk)
    assert "Resumed" in decide(staff, "runs/run", "resume", run.pk)
    assert "Nothing to resume" in decide(staff, "runs/run", "resume", run.pk)
    assert "Finished" in decide(staff, "runs/run", "finish", run.pk)
    run.refresh_from_db()
    assert run.state is enums.RunStatus.FINISHED
    noted = AuditEntry.objects.filter(
        subject_id=str(run.pk), actor__email="root@example.org"
    ).order_by("id")
    assert list(noted.values_list("action", flat=True)) == ["run.pause", "run.resume", "run.finish"]


def test_staff_extend_a_budget_and_workers_hear_of_it(staff, person, launched_run, numbered_report):
    run, ada = launched_run(person())
    before, spec = run.token_budget, run.spec_text
    page = staff.post(f"/admin/runs/run/{run.pk}/extend/", {"_form_submitted": "1", "tokens": "-5"})
    assert page.status_code == 200 and b"greater than or equal to 1" in page.content
    assert "5,000 more tokens" in decide(staff, "runs/run", "extend", run.pk, tokens="5000")
    run.refresh_from_db()
    assert run.token_budget == before + 5000 and run.spec_text == spec, "its rules never change"
    answer = coordinator_messages.ReportReply.model_validate_json(
        ada.report(run, numbered_report(1)).content
    )
    assert (
        coordinator_messages.Directive.model_validate_json(answer.directive.body).token_budget
        == before + 5000
    )
    assert AuditEntry.objects.get(action="run.extend").detail == {"tokens": 5000}
    run.record_ledger_tokens(run.token_budget)
    page = staff.post(
        f"/admin/runs/run/{run.pk}/extend/", {"_form_submitted": "1", "tokens": "5000"}
    )
    assert b"Its budget is spent" in page.content and b"5000" in page.content, (
        "at the field, with what was typed"
    )


def test_staff_read_how_long_the_audit_log_is_kept(staff, settings):
    assert b"kept for 730 days" in staff.get("/admin/audit/auditentry/").content
    settings.AUDIT_DAYS = 0
    assert b"never deleted" in staff.get("/admin/audit/auditentry/").content


def test_staff_ban_a_machine_and_say_why(staff, person, volunteer):
    machine = volunteer(person()).machine
    dialog = staff.get(f"/admin/accounts/machine/{machine.pk}/revoke/")
    assert dialog.status_code == 200 and not Machine.objects.get().revoked, "looking bans nobody"
    unsaid = staff.post(
        f"/admin/accounts/machine/{machine.pk}/revoke/", {"_form_submitted": "1", "reason": ""}
    )
    assert unsaid.status_code == 200 and not Machine.objects.get().revoked, "a ban needs a reason"
    assert "is banned" in decide(
        staff, "accounts/machine", "revoke", machine.pk, reason="mines coins"
    )
    assert Machine.objects.get().revoked and Machine.objects.get().revoked_reason == "mines coins"
    assert "before" in decide(staff, "accounts/machine", "revoke", machine.pk, reason="again")
    entry = AuditEntry.objects.get(action="machine.revoke")
    assert entry.detail == {"reason": "mines coins"} and entry.actor.email == "root@example.org"


def test_staff_decide_about_people(staff, person):
    ada = person(name="Ada")
    assert "Done" in decide(staff, "accounts/user", "make_organiser", ada.pk)
    assert "already" in decide(staff, "accounts/user", "make_organiser", ada.pk)
    assert "banned" in decide(staff, "accounts/user", "ban", ada.pk, reason="spam")
    ada.refresh_from_db()
    assert ada.organiser and not ada.is_active and ada.ban_reason == "spam"
    assert "may sign in again" in decide(staff, "accounts/user", "unban", ada.pk)
    assert "Done" in decide(staff, "accounts/user", "make_staff", ada.pk)
    assert "deleted" in decide(staff, "accounts/user", "erase", ada.pk)
    ada.refresh_from_db()
    assert ada.left and "Ada" not in ada.shown_name
    root = type(ada).objects.get(email="root@example.org")
    assert "bans themselves" in decide(staff, "accounts/user", "ban", root.pk, reason="oops")
    missing = staff.post("/admin/accounts/user/0/ban/", {"_form_submitted": "1", "reason": "x"})
    assert missing.status_code == 404


def test_a_decision_cannot_be_sent_from_another_site(staff, person, volunteer):
    machine = volunteer(person()).machine
    strict = Client(enforce_csrf_checks=True)
    strict.cookies = staff.cookies
    sent = {"_form_submitted": "1", "reason": "x"}
    assert strict.post(f"/admin/accounts/machine/{machine.pk}/revoke/", sent).status_code == 403
    assert not Machine.objects.get().revoked


def test_staff_change_the_sites_rules_and_disband_a_team(staff, person):
    team = Team.create("Weavers", person())
    page = staff.get("/admin/accounts/sitesettings/", follow=True)
    assert page.status_code == 200
    rules = SiteSettings.objects.get()
    staff.post(f"/admin/accounts/sitesettings/{rules.pk}/change/", {"organisers": "granted"})
    assert SiteSettings.current().organisers == "granted"
    assert AuditEntry.objects.get(action="site.settings").detail == {
        "before": "everybody",
        "after": "granted",
    }
    assert "disbanded" in decide(staff, "accounts/team", "disband", team.pk, reason="a rude name")
    assert not Team.objects.exists() and AuditEntry.objects.filter(action="team.disband").exists()


def test_staff_announce_and_withdraw(staff, valkey):
    told = {
        "text": "Power cut <b>tonight</b>",
        "tone": "warning",
        "starts_0": "2026-01-01",
        "starts_1": "00:00:00",
    }
    assert staff.post("/admin/staff/announcement/add/", told).status_code == 302
    said = Announcement.objects.get()
    page = Client().get("/").content.decode()
    assert "Power cut &lt;b&gt;tonight" in page
    assert "Withdrawn" in decide(staff, "staff/announcement", "withdraw", said.pk)
    assert "Power cut" not in Client().get("/").content.decode()
    actions = (
        AuditEntry.objects.filter(subject_kind="announcement")
        .order_by("id")
        .values_list("action", flat=True)
    )
    assert list(actions) == ["announcement.publish", "announcement.withdraw"]


def test_the_dashboard_shows_runs_machines_queues_and_errors(
    staff, person, launched_run, numbered_report
):
    run, ada = launched_run(person(), name="Evening <i>shift</i>")
    ada.report(run, numbered_report(1))
    logging.getLogger("coordinator.test").error("the roof leaks <script>")
    Notification.create_once(
        NotificationDraft(run.owner, NotificationType.RUN_STARTED, "one", "It started")
    )
    for path in ("/admin/", "/admin/figures/"):
        page = staff.get(path).content.decode()
        assert "Evening &lt;i&gt;shift" in page and "the roof leaks &lt;script&gt;" in page
        assert re.search(r"Machines training</dt><dd>1</dd>", page)
        assert re.search(r"Reports queued</dt><dd>1</dd>", page)
        assert re.search(r"Errors</dt><dd>1</dd>", page)
        assert re.search(r"Emails due</dt><dd>1</dd>", page)


def test_the_dashboard_says_when_valkey_is_gone(staff, valkey, state):
    embedded_servers.stop_valkey(state)
    try:
        page = staff.get("/admin/figures/")
        assert page.status_code == 200 and b"unreachable" in page.content
    finally:
        embedded_servers.start(state, durable=False)


def test_every_admin_page_opens(staff, person, launched_run):
    run, ada = launched_run(person())
    for path in (
        "",
        "figures/",
        "accounts/user/",
        "accounts/team/",
        "accounts/sitesettings/",
        "audit/auditentry/",
        "staff/announcement/",
        "staff/announcement/add/",
        f"accounts/user/{run.owner.pk}/change/",
        "accounts/machine/",
        f"accounts/machine/{ada.machine.pk}/change/",
        "accounts/enrolment/",
        "runs/run/",
        f"runs/run/{run.pk}/change/",
        "fleet/membership/",
        "django_celery_beat/periodictask/",
    ):
        assert staff.get(f"/admin/{path}").status_code == 200, path


def test_the_admin_writes_nothing_past_the_models_methods(staff, person, launched_run):
    run, ada = launched_run(person())
    fields = {
        "name": "Renamed",
        "quorum": 1,
        "report_every": 1,
        "status": "finished",
        "ledger_tokens": 5,
    }
    assert staff.post(f"/admin/runs/run/{run.pk}/change/", fields).status_code == 403
    run.refresh_from_db()
    assert run.name == "A run" and run.state is enums.RunStatus.TRAINING and run.ledger_tokens == 0
    for path, pk in (("accounts/user", run.owner_id), ("accounts/machine", ada.machine.pk)):
        assert (
            staff.post(f"/admin/{path}/{pk}/change/", {"email": "x@example.org"}).status_code == 403
        )
        assert staff.post(f"/admin/{path}/{pk}/delete/", {"post": "yes"}).status_code == 403


@pytest.mark.parametrize("email", [None, "ada@example.org"])
def test_nobody_but_staff_enters_the_admin(client, person, launched_run, email):
    run, _ = launched_run(person())
    if email:
        client.force_login(run.owner)
    for method in (client.get, client.post):
        answer = method("/admin/runs/run/", {"action": "finish", "_selected_action": str(run.pk)})
        assert answer.status_code in (302, 403)
    run.refresh_from_db()
    assert run.state is enums.RunStatus.TRAINING


def test_people_log_in_by_address_and_password_in_any_case(client, person, valkey):
    user = person()
    EmailAddress.objects.create(user=user, email=user.email, verified=True, primary=True)
    answer = client.post("/accounts/login/", {"login": "Ada@Example.org", "password": PASSWORD})
    assert answer.status_code == 302 and client.session["_auth_user_id"] == str(user.pk)


def test_a_wrong_password_is_told_and_logs_nobody_in(client, person, valkey):
    person()
    answer = client.post("/accounts/login/", {"login": "ada@example.org", "password": "wrong"})
    assert answer.status_code == 200 and "_auth_user_id" not in client.session


def test_pages_and_admin_say_what_browsers_may_load(client, staff):
    assert "script-src 'self';" in client.get("/accounts/login/")["Content-Security-Policy"] + ";"
    assert "unsafe-eval" not in Client().get("/accounts/login/")["Content-Security-Policy"]
    assert "unsafe-eval" in staff.get("/admin/")["Content-Security-Policy"]
