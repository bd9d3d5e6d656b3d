"""Test the admin: what staff decide there, the dashboard, and who gets in."""

import logging
import re
import time
from datetime import UTC, datetime, timedelta

import pytest
from allauth.account.models import EmailAddress
from allauth.mfa.models import Authenticator
from django.core import mail
from django.test import Client
from django.utils import timezone
from helpers.site.machine_replies import read_directive, read_reply
from helpers.site.notices import notify
from helpers.site.second_factor import add_authenticator_app

from barnraise.protocol import enums
from coordinator.accounts.models import Machine, SiteSettings, Team
from coordinator.audit.models import AuditEntry
from coordinator.fleet.models import Membership
from coordinator.fleet.run_broadcast import REVOCATION_SECONDS, load_broadcast
from coordinator.lib import heartbeats
from coordinator.lib.backup_record import record_backup
from coordinator.lib.embedded import embedded_servers, valkey_server
from coordinator.runs.models import Run
from coordinator.staff.models import Announcement
from coordinator.tokens.models import Token

pytestmark = pytest.mark.django_db
PASSWORD = "wooden-barn-9"


@pytest.fixture
def staff(person, client) -> Client:
    """Return a client that is signed in as a superuser."""
    client.force_login(person("root@example.org", is_staff=True, is_superuser=True))
    return client


def run_list_action(client: Client, model: str, action: str, pk: object) -> str:
    """Run an action of the model's list on one row, and return the messages shown."""
    fields = {"action": action, "_selected_action": str(pk)}
    response = client.post(f"/admin/{model}/", fields, follow=True)
    assert response.status_code == 200
    return " ".join(str(message) for message in response.context["messages"])


def decide(client: Client, path: str, **fields: str) -> str:
    """Submit the dialog of a decision, "model/key/action", and return the messages shown."""
    response = client.post(f"/admin/{path}/", {"_form_submitted": "1", **fields}, follow=True)
    assert response.status_code == 200, response.status_code
    return " ".join(str(message) for message in response.context["messages"])


def test_staff_pauses_resumes_and_finishes_a_run(staff, adas_run):
    run, _ = adas_run
    assert "Paused" in run_list_action(staff, "runs/run", "pause_all", run.pk)
    run.refresh_from_db()
    assert run.state is enums.RunStatus.PAUSED
    assert "nothing to pause" in run_list_action(staff, "runs/run", "pause_all", run.pk)
    assert "Resumed" in decide(staff, f"runs/run/{run.pk}/resume")
    assert "Nothing to resume" in decide(staff, f"runs/run/{run.pk}/resume")
    assert "Finished" in decide(staff, f"runs/run/{run.pk}/finish")
    run.refresh_from_db()
    assert run.state is enums.RunStatus.FINISHED
    entries = AuditEntry.objects.filter(subject_id=str(run.pk), actor__email="root@example.org")
    actions = entries.order_by("id").values_list("action", flat=True)
    assert list(actions) == ["run.pause", "run.resume", "run.finish"]


def test_admin_writes_dates_and_numbers_for_people(staff, adas_run):
    run, _ = adas_run
    at = datetime(2026, 11, 29, 7, 39, tzinfo=UTC)
    Run.objects.filter(pk=run.pk).update(ledger_tokens=307_200, created=at)
    member = run.memberships.get()
    stamp = int(at.timestamp() * 1000)
    figures = {"tokens": 307_200, "changed": stamp, "peer_bytes_sent": 2_100_000}
    type(member).objects.filter(pk=member.pk).update(**figures)
    for page in ("runs/run/", "fleet/membership/", f"fleet/membership/{member.pk}/change/"):
        html = staff.get(f"/admin/{page}").content.decode()
        assert "307,200" in html and "307200" not in html, page
    assert "29 Nov 2026, 07:39" in staff.get("/admin/runs/run/").content.decode()
    assert "29 Nov 2026, 07:39" in html and f"{stamp:,}" not in html and "2.1 MB" in html


def test_budget_extended_by_staff_reaches_workers(staff, adas_run, numbered_report):
    run, ada = adas_run
    budget = run.token_budget
    spec = run.spec_text
    path = f"/admin/runs/run/{run.pk}/extend/"
    page = staff.post(path, {"_form_submitted": "1", "tokens": "-5"})
    assert page.status_code == 200 and b"greater than or equal to 1" in page.content
    assert "5,000 more tokens" in decide(staff, f"runs/run/{run.pk}/extend", tokens="5000")
    run.refresh_from_db()
    assert run.token_budget == budget + 5000 and run.spec_text == spec, "a spec never changes"
    directive = read_directive(read_reply(ada.report(run, numbered_report(1))))
    assert directive.token_budget == budget + 5000
    assert AuditEntry.objects.get(action="run.extend").detail == {"tokens": 5000}
    run.record_ledger_tokens(run.token_budget)
    page = staff.post(path, {"_form_submitted": "1", "tokens": "5000"})
    assert b"Its budget is spent" in page.content
    assert b"5000" in page.content, "the field retains its input"


def test_audit_log_page_states_its_retention(staff, settings):
    assert b"kept for 730 days" in staff.get("/admin/audit/auditentry/").content
    settings.AUDIT_DAYS = 0
    assert b"never deleted" in staff.get("/admin/audit/auditentry/").content


def test_machine_ban_needs_a_reason_and_records_it(staff, person, volunteer):
    machine = volunteer(person()).machine
    path = f"accounts/machine/{machine.pk}/revoke"
    dialog = staff.get(f"/admin/{path}/")
    assert dialog.status_code == 200 and not Machine.objects.get().revoked, "viewing bans nobody"
    response = staff.post(f"/admin/{path}/", {"_form_submitted": "1", "reason": ""})
    assert response.status_code == 200 and not Machine.objects.get().revoked
    assert "is banned" in decide(staff, path, reason="mines coins")
    assert Machine.objects.get().revoked and Machine.objects.get().revoked_reason == "mines coins"
    assert "before" in decide(staff, path, reason="again")
    entry = AuditEntry.objects.get(action="machine.revoke")
    assert entry.detail == {"reason": "mines coins"} and entry.actor.email == "root@example.org"


def test_machine_ban_ends_when_staff_reinstate_it(staff, person, volunteer, launched_run):
    ada = person()
    run, _ = launched_run(person("bob@example.org"))
    member = volunteer(ada, 5)
    member.join(run)
    path = f"accounts/machine/{member.machine.pk}"
    decide(staff, f"{path}/revoke", reason="noise")
    assert member.machine.key in load_broadcast(run).revoked
    assert "may take part again" in decide(staff, f"{path}/reinstate")
    assert "not banned" in decide(staff, f"{path}/reinstate")
    assert not load_broadcast(run).revoked and member.join(run)
    member.machine.refresh_from_db()
    member.machine.revoke(actor=ada)
    assert "owner revoked it" in decide(staff, f"{path}/reinstate")


def test_revocation_leaves_directives_once_no_ticket_is_left(adas_run, strangers):
    run, _ = adas_run
    (member,) = strangers(run, 5)
    member.machine.revoke(reason="noise")
    assert load_broadcast(run).revoked == (member.machine.key,)
    long_ago = timezone.now() - timedelta(seconds=REVOCATION_SECONDS)
    Machine.objects.filter(pk=member.machine.pk).update(revoked=long_ago)
    assert not load_broadcast(run).revoked


def test_staff_promotes_bans_and_erases_people(staff, person):
    ada = person(name="Ada")
    assert "Done" in decide(staff, f"accounts/user/{ada.pk}/make_organiser")
    assert "already" in decide(staff, f"accounts/user/{ada.pk}/make_organiser")
    assert "banned" in decide(staff, f"accounts/user/{ada.pk}/ban", reason="spam")
    ada.refresh_from_db()
    assert ada.organiser and not ada.is_active and ada.ban_reason == "spam"
    assert "may sign in again" in decide(staff, f"accounts/user/{ada.pk}/unban")
    assert "second factor" in decide(staff, f"accounts/user/{ada.pk}/make_staff")
    add_authenticator_app(ada)
    assert "Done" in decide(staff, f"accounts/user/{ada.pk}/make_staff")
    assert "deleted" in decide(staff, f"accounts/user/{ada.pk}/erase")
    ada.refresh_from_db()
    assert ada.left and "Ada" not in ada.shown_name
    root = type(ada).objects.get(email="root@example.org")
    assert "bans themselves" in decide(staff, f"accounts/user/{root.pk}/ban", reason="oops")
    response = staff.post("/admin/accounts/user/0/ban/", {"_form_submitted": "1", "reason": "x"})
    assert response.status_code == 404


def test_staff_changes_site_settings_and_disbands_a_team(staff, person):
    team = Team.create("Weavers", person())
    page = staff.get("/admin/accounts/sitesettings/", follow=True)
    assert page.status_code == 200
    site_settings = SiteSettings.objects.get()
    path = f"/admin/accounts/sitesettings/{site_settings.pk}/change/"
    staff.post(path, {"organisers": "granted", "sign_up": "domains", "sign_up_domains": "a.org"})
    assert SiteSettings.current().organisers == "granted"
    assert SiteSettings.current().domains == {"a.org"}
    assert AuditEntry.objects.get(action="site.settings").detail == {
        "before": "everybody",
        "after": "granted",
    }
    assert "disbanded" in decide(staff, f"accounts/team/{team.pk}/disband", reason="a rude name")
    assert not Team.objects.exists() and AuditEntry.objects.filter(action="team.disband").exists()


def test_announcement_is_shown_until_staff_withdraws_it(staff, valkey):
    fields = {
        "text": "Power cut <b>tonight</b>",
        "tone": "warning",
        "starts_0": "2026-01-01",
        "starts_1": "00:00:00",
    }
    assert staff.post("/admin/staff/announcement/add/", fields).status_code == 302
    announcement = Announcement.objects.get()
    page = Client().get("/").content.decode()
    assert "Power cut &lt;b&gt;tonight" in page
    assert "Withdrawn" in decide(staff, f"staff/announcement/{announcement.pk}/withdraw")
    assert "Power cut" not in Client().get("/").content.decode()
    entries = AuditEntry.objects.filter(subject_kind="announcement").order_by("id")
    actions = entries.values_list("action", flat=True)
    assert list(actions) == ["announcement.publish", "announcement.withdraw"]


def test_dashboard_shows_runs_machines_queues_and_errors(
    staff, person, launched_run, numbered_report
):
    run, ada = launched_run(person(), name="Evening <i>shift</i>")
    ada.report(run, numbered_report(1))
    logging.getLogger("coordinator.test").error("the roof leaks <script>")
    notify(run.owner)
    for path in ("/admin/", "/admin/figures/"):
        page = staff.get(path).content.decode()
        assert "Evening &lt;i&gt;shift" in page and "the roof leaks &lt;script&gt;" in page
        assert re.search(r"Machines reporting</dt><dd>1</dd>", page)
        assert re.search(r"Reports queued</dt><dd>1</dd>", page)
        assert re.search(r"Errors</dt><dd>1</dd>", page)
        assert re.search(r"Emails due</dt><dd>1</dd>", page)


def test_dashboard_without_celery_shows_machines_and_rates(
    staff, valkey, adas_run, numbered_report
):
    """Nothing drains the queue of reports: the figures come from the live store."""
    run, ada = adas_run
    Membership.objects.update(last_seen=timezone.now() - timedelta(hours=1))
    ada.report(run, numbered_report(1, rate=512.0))
    valkey.hset(heartbeats.KEY, heartbeats.Part.REPORTS, time.time() - 60)
    page = staff.get("/admin/figures/").content.decode()
    assert "Celery or beat has not advanced since" in page
    assert re.search(r"Machines reporting</dt><dd>1</dd>", page)
    assert re.search(r"Tokens/s</dt><dd>512</dd>", page)
    assert "<td>1</td><td>512</td>" in page


def test_dashboard_shows_a_day_as_lines_and_the_last_backup(
    staff, adas_run, numbered_report, settings, tmp_path
):
    run, ada = adas_run
    ada.store_reports(run, numbered_report(1))
    settings.STATE_DIR = tmp_path
    page = staff.get("/admin/figures/").content.decode()
    assert page.count('class="spark-line"') == 3
    assert 'aria-label="Machines, from 0 to 1, at most 1"' in page
    assert re.search(r'data-tone="warning"><dt>Last backup</dt><dd>none', page)
    dump = tmp_path / "b" / "database.dump"
    dump.parent.mkdir()
    dump.write_bytes(b"x" * 3_000_000)
    record_backup(tmp_path, [dump])
    page = staff.get("/admin/figures/").content.decode()
    assert re.search(r"<div><dt>Last backup</dt><dd>[0-9.e-]+ s</dd>", page)


def test_test_letter_goes_out_at_once_and_shows_a_refusal(staff, settings):
    answer = staff.post("/admin/test-letter/", follow=True).content.decode()
    assert "The letter went out to" in answer and len(mail.outbox) == 1
    assert "test letter" in mail.outbox[0].subject
    settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
    settings.EMAIL_HOST, settings.EMAIL_PORT = "127.0.0.1", 1
    answer = staff.post("/admin/test-letter/", follow=True).content.decode()
    assert "The letter was not sent" in answer


def test_staff_of_a_site_without_mail_server_are_warned(staff, settings, built_frontend):
    assert "sends no emails" not in staff.get("/").content.decode()
    settings.EMAIL_BACKEND = "django.core.mail.backends.console.EmailBackend"
    assert "sends no emails" in staff.get("/").content.decode()
    assert "sends no emails" not in Client().get("/").content.decode()


def test_dashboard_without_valkey_says_it_is_unreachable(staff, valkey, state):
    valkey_server.stop_valkey(state)
    try:
        page = staff.get("/admin/figures/")
        assert page.status_code == 200 and b"unreachable" in page.content
    finally:
        embedded_servers.start(state, durable=False)


def test_sign_in_ignores_the_case_of_the_address(client, person, valkey):
    user = person()
    EmailAddress.objects.create(user=user, email=user.email, verified=True, primary=True)
    response = client.post("/accounts/login/", {"login": "Ada@Example.org", "password": PASSWORD})
    assert response.status_code == 302 and client.session["_auth_user_id"] == str(user.pk)


# ---- second factors


@pytest.mark.parametrize(
    "path", ["/admin/", "/admin/figures/", "/admin/accounts/user/", "/admin/accounts/sitesettings/"]
)
def test_stolen_password_of_staff_without_second_factor_opens_no_admin(
    person, client, valkey, path
):
    clerk = person("clerk@example.org", is_staff=True, is_superuser=True)
    client.force_login(clerk)
    assert client.get(path, follow=True).status_code == 200
    Authenticator.objects.filter(user=clerk).delete()
    for answer in (client.get(path), client.post(path, {"action": "ban"})):
        assert answer.status_code == 302 and answer["Location"] == "/accounts/2fa/"
    assert "authenticator app or a passkey" in client.get("/accounts/2fa/").content.decode()
    assert client.post("/admin/logout/")["Location"] == "/"


def test_recovery_codes_alone_are_no_second_factor_of_staff(person, client, valkey):
    clerk = person("clerk@example.org", is_staff=True)
    Authenticator.objects.filter(user=clerk).update(type=Authenticator.Type.RECOVERY_CODES)
    client.force_login(clerk)
    assert client.get("/admin/")["Location"] == "/accounts/2fa/"


def test_stolen_password_of_staff_without_second_factor_controls_no_run(
    person, draft, launched_run, client, valkey
):
    owner, clerk = person(), person("clerk@example.org", is_staff=True)
    run, _ = launched_run(owner)
    hidden = draft(owner, "Hidden")
    client.force_login(clerk)
    assert client.get(f"/runs/{hidden.slug}/").status_code == 200
    Authenticator.objects.filter(user=clerk).delete()
    assert client.get(f"/runs/{hidden.slug}/").status_code == 404
    assert client.post(f"/runs/{run.slug}/pause/").status_code in (403, 404)
    run.refresh_from_db()
    assert run.status == "training" and "Hidden" not in client.get("/runs/").content.decode()
    assert not client.get("/mirrors/").context["heads"]


def test_stolen_token_of_staff_controls_no_run_of_others(
    person, draft, launched_run, client, valkey
):
    owner, clerk = person(), person("clerk@example.org", is_staff=True)
    (run, _), hidden = launched_run(owner), draft(owner, "Hidden")
    _, text = Token.create(clerk, "script", ["runs:read", "runs:write"], 30)
    headers = {"Authorization": f"Bearer {text}"}
    assert client.get(f"/api/v1/runs/{hidden.slug}", headers=headers).status_code == 404
    assert client.post(f"/api/v1/runs/{run.slug}/actions/pause", headers=headers).status_code == 403
    run.refresh_from_db()
    assert run.status == "training"
