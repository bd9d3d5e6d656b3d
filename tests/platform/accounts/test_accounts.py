"""Test accounts: sign-up, verified addresses, second factors, roles, bans and deletion."""

import re

import pytest
from allauth.account.models import EmailAddress
from allauth.mfa.adapter import get_adapter
from allauth.mfa.models import Authenticator
from allauth.mfa.totp.internal.auth import (
    TOTP,
    generate_totp_secret,
    hotp_value,
    yield_hotp_counters_from_time,
)
from django.conf import settings
from django.core import mail
from django.db import connection
from django.test import Client
from helpers.site.pages import text as page
from helpers.site.second_factor import AuthenticatorApp, add_authenticator_app

from coordinator.accounts import login_limits
from coordinator.accounts.deletion import delete_account
from coordinator.accounts.models import Enrolment, Machine, SiteSettings, Team, User, UserError
from coordinator.audit.models import AuditEntry
from coordinator.fleet.machine_state import HardwareMeasurement
from coordinator.runs.invitations import RunInvitation
from coordinator.runs.join_policy import JoinPolicy
from coordinator.tokens.models import Token

pytestmark = pytest.mark.django_db
PASSWORD = "wooden-barn-9"
EVE = {"email": "eve@example.org", "password1": "oak-and-spruce-7", "name": "Eve"}


@pytest.fixture
def verified_person(person):
    """Return a function that creates a person with a verified address, who can log in."""

    def create(email: str = "ada@example.org", **fields) -> User:
        user = person(email, **fields)
        EmailAddress.objects.create(user=user, email=email, verified=True, primary=True)
        return user

    return create


# ---- sign-up and login


def test_sign_up_requires_the_code_sent_by_email(run_queued_tasks, valkey):
    client = Client()
    answer = client.post("/accounts/signup/", EVE)
    assert answer.status_code == 302 and "confirm-email" in answer["Location"]
    assert "_auth_user_id" not in client.session, "signed in before the address is verified"
    run_queued_tasks()
    (message,) = mail.outbox
    assert message.to == ["eve@example.org"]
    code = re.search(r"^\s*([A-Z0-9]{3,}-?[A-Z0-9]{3,})\s*$", message.body, re.M)[1]
    wrong = client.post("/accounts/confirm-email/", {"code": "NOT-IT"})
    assert wrong.status_code == 200 and "_auth_user_id" not in client.session
    assert client.post("/accounts/confirm-email/", {"code": code}).status_code == 302
    eve = User.objects.get(email="eve@example.org")
    assert client.session["_auth_user_id"] == str(eve.pk) and eve.shown_name == "Eve"
    assert EmailAddress.objects.get(user=eve).verified
    assert AuditEntry.objects.filter(action="user.sign_up", subject_id=str(eve.pk)).exists()


def test_forms_do_not_reveal_whether_an_address_has_an_account(
    verified_person, run_queued_tasks, valkey
):
    verified_person("ada@example.org")
    responses = []
    for email in ("ada@example.org", "new@example.org"):
        client = Client()
        answer = client.post("/accounts/signup/", {**EVE, "email": email})
        responses.append(
            (
                answer.status_code,
                answer["Location"],
                re.sub(email, "", page(client.get(answer["Location"]))),
            )
        )
    assert responses[0] == responses[1]
    responses = []
    for email in ("ada@example.org", "nobody@example.org"):
        client = Client()
        answer = client.post("/accounts/password/reset/", {"email": email})
        responses.append((answer.status_code, answer["Location"]))
        wrong = client.post("/accounts/login/", {"login": email, "password": "wrong-barn-9"})
        responses.append(
            (wrong.status_code, re.findall(r'role="alert">(.*?)<', wrong.content.decode()))
        )
    assert responses[:2] == responses[2:]
    run_queued_tasks()
    subjects = {message.to[0]: message.subject for message in mail.outbox}
    assert subjects.keys() == {"ada@example.org", "new@example.org", "nobody@example.org"}


def test_login_is_limited_after_many_wrong_passwords(verified_person, valkey):
    verified_person()
    client = Client()
    answers = [
        client.post("/accounts/login/", {"login": "ada@example.org", "password": f"guess-{n}"})
        for n in range(7)
    ]
    assert any("Too many attempts" in page(answer) for answer in answers)
    right = client.post("/accounts/login/", {"login": "ada@example.org", "password": PASSWORD})
    assert "_auth_user_id" not in client.session, "signed in while login is limited"
    assert right.status_code in (200, 429)


def test_forgotten_password_is_reset_through_the_emailed_link(
    verified_person, run_queued_tasks, valkey
):
    verified_person()
    client = Client()
    client.post("/accounts/password/reset/", {"email": "ada@example.org"})
    run_queued_tasks()
    link = re.search(rf"{settings.SITE_URL}(\S+)", mail.outbox[0].body)[1]
    form = client.get(link, follow=True)
    answer = client.post(
        form.request["PATH_INFO"], {"password1": "a-new-barn-11", "password2": "a-new-barn-11"}
    )
    assert answer.status_code == 302
    login = Client().post(
        "/accounts/login/", {"login": "ada@example.org", "password": "a-new-barn-11"}
    )
    assert login.status_code == 302
    assert AuditEntry.objects.filter(action="user.password_reset").exists()


@pytest.mark.parametrize("known", [True, False])
def test_foreign_port_of_a_host_reaches_no_link_of_a_mail(
    verified_person, run_queued_tasks, valkey, known
):
    """Somebody who owns a port of the site's host would get the reset token."""
    verified_person()
    address = "ada@example.org" if known else "nobody@example.org"
    answer = Client(headers={"Host": "testserver:6666"}).post(
        "/accounts/password/reset/", {"email": address}
    )
    assert answer.status_code == 302
    run_queued_tasks()
    (message,) = mail.outbox
    links = re.findall(r"https?://\S+", message.body)
    assert links and all(link.startswith(f"{settings.SITE_URL}/") for link in links)
    assert "6666" not in message.body + message.subject


def test_login_with_second_factor_requires_password_and_code(verified_person, valkey):
    ada = verified_person()
    secret = generate_totp_secret()
    TOTP.activate(ada, secret)
    client = Client()
    answer = client.post("/accounts/login/", {"login": "ada@example.org", "password": PASSWORD})
    assert (
        answer["Location"].startswith("/accounts/2fa/authenticate/")
        and "_auth_user_id" not in client.session
    )
    assert client.post("/accounts/2fa/authenticate/", {"code": "000000"}).status_code == 200
    code = str(hotp_value(secret, next(iter(yield_hotp_counters_from_time())))).zfill(6)
    assert client.post("/accounts/2fa/authenticate/", {"code": code}).status_code == 302
    assert client.session["_auth_user_id"] == str(ada.pk)
    assert Authenticator.objects.get(user=ada).data["secret"] != "", get_adapter()


# ---- guesses of passwords


def log_in(password: str, address: str, client: Client | None = None) -> tuple[Client, str]:
    """Try to log Ada in from a network; return (client, page shown)."""
    client = client or Client()
    fields = {"login": "ada@example.org", "password": password}
    answer = client.post("/accounts/login/", fields, REMOTE_ADDR=address, follow=True)
    return client, answer.content.decode()


def is_signed_in(client: Client) -> bool:
    return "_auth_user_id" in client.session


def test_stranger_with_wrong_passwords_does_not_lock_the_owner_out(verified_person, valkey):
    verified_person()
    for _ in range(10):
        _, shown = log_in("wrong", "198.51.100.9")
    assert "Too many attempts from your network" in shown
    assert not is_signed_in(log_in(PASSWORD, "198.51.100.9")[0]), "the guesser goes on guessing"
    assert is_signed_in(log_in(PASSWORD, "203.0.113.7")[0])


def test_guesses_from_all_addresses_of_a_64_count_as_one_source(verified_person, valkey):
    verified_person()
    for n in range(8):
        log_in("wrong", f"2001:db8:1:2::{n:x}")
    assert not is_signed_in(log_in(PASSWORD, "2001:db8:1:2::ffff")[0])
    assert is_signed_in(log_in(PASSWORD, "2001:db8:1:3::1")[0])


@pytest.fixture
def guessed_from_everywhere(verified_person, valkey, monkeypatch):
    """Yield Ada and a browser of hers, while a hundred networks guess her password."""
    monkeypatch.setattr(login_limits, "MAX_GUESSES", 5)
    ada = verified_person()
    browser, _ = log_in(PASSWORD, "203.0.113.7")
    browser.post("/accounts/logout/")
    for n in range(6):
        log_in("wrong", f"198.51.{n}.9")
    return ada, browser


def test_guesses_from_many_networks_end_and_leave_the_owner_ways_in(
    guessed_from_everywhere, run_queued_tasks
):
    _, browser = guessed_from_everywhere
    guesser, shown = log_in(PASSWORD, "198.51.99.9")  # a lucky guess
    assert not is_signed_in(guesser) and "Somebody is guessing" in shown
    assert is_signed_in(log_in(PASSWORD, "192.0.2.1", browser)[0]), "a browser of hers, elsewhere"
    elsewhere = Client(REMOTE_ADDR="192.0.2.2")
    elsewhere.post("/accounts/login/code/", {"email": "ada@example.org"})
    run_queued_tasks()
    code = re.search(r"^\s*([A-Z0-9]{3,}-?[A-Z0-9]{3,})\s*$", mail.outbox[-1].body, re.M)[1]
    assert elsewhere.post("/accounts/login/code/confirm/", {"code": code}).status_code == 302
    assert is_signed_in(elsewhere)


def test_second_factor_is_a_way_in_while_a_password_is_guessed(guessed_from_everywhere):
    ada, _ = guessed_from_everywhere
    add_authenticator_app(ada)
    client, shown = log_in(PASSWORD, "192.0.2.3")
    assert "Two-factor sign-in" in shown and not is_signed_in(client)
    client.post("/accounts/2fa/authenticate/", {"code": AuthenticatorApp().next_code()})
    assert is_signed_in(client)


def test_device_cookie_of_somebody_else_gives_no_attempts(guessed_from_everywhere, verified_person):
    verified_person("eve@example.org")
    eve = Client()
    eve.post("/accounts/login/", {"login": "eve@example.org", "password": PASSWORD})
    assert is_signed_in(eve)
    eve.post("/accounts/logout/")
    eve.cookies["device"].set("device", eve.cookies["device"].value, eve.cookies["device"].value)
    assert not is_signed_in(log_in(PASSWORD, "192.0.2.4", eve)[0])


def test_stranger_can_neither_flood_an_address_nor_use_up_its_emails(
    verified_person, run_queued_tasks, valkey
):
    verified_person()
    stranger = Client(REMOTE_ADDR="198.51.100.9")
    for _ in range(12):
        stranger.post("/accounts/password/reset/", {"email": "ada@example.org"})
        stranger.post("/accounts/login/code/", {"email": "ada@example.org"})
    run_queued_tasks()
    assert len(mail.outbox) == login_limits.MAX_EMAILS
    owner = Client(REMOTE_ADDR="203.0.113.7")
    owner.post("/accounts/login/code/", {"email": "ada@example.org"})
    run_queued_tasks()
    assert len(mail.outbox) == login_limits.MAX_EMAILS + 1


# ---- roles and rules


def test_everybody_may_create_runs_until_staff_restrict_it(verified_person):
    ada, root = verified_person(), verified_person("root@example.org", is_staff=True)
    assert (ada.role, root.role) == ("organiser", "staff")
    assert SiteSettings.set_organisers("granted", root)
    assert not SiteSettings.set_organisers("granted", root)
    ada = User.objects.get(pk=ada.pk)
    assert ada.role == "volunteer" and not ada.may_create_runs
    client = Client()
    client.force_login(ada)
    answer = client.get("/runs/new/")
    assert answer.status_code == 403 and "ask the staff" in page(answer)
    assert "/runs/new/" not in client.get("/").content.decode()
    assert ada.grant("organiser", root) and not ada.grant("organiser", root)
    assert client.get("/runs/new/").status_code == 200
    assert ada.grant("organiser", root, given=False)
    assert client.get("/runs/new/").status_code == 403
    actions = set(AuditEntry.objects.values_list("action", flat=True))
    assert {"site.settings", "user.organiser", "user.not_organiser"} <= actions


def test_only_superusers_grant_staff_and_nobody_revokes_their_own(verified_person):
    ada = verified_person()
    root = verified_person("root@example.org", is_staff=True, is_superuser=True)
    clerk = verified_person("clerk@example.org", is_staff=True)
    with pytest.raises(UserError, match="superuser"):
        ada.grant("is_staff", clerk)
    with pytest.raises(UserError, match="themselves"):
        root.grant("is_staff", root, given=False)
    with pytest.raises(UserError, match="second factor"):
        ada.grant("is_staff", root)
    add_authenticator_app(ada)
    assert ada.grant("is_staff", root)
    with pytest.raises(UserError, match="superuser"):
        ada.ban(clerk, "a quarrel")


def test_staff_may_change_site_models_and_superusers_all_models(verified_person):
    clerk = verified_person("clerk@example.org", is_staff=True)
    root = verified_person("r@example.org", is_staff=True, is_superuser=True)
    assert clerk.has_perm("runs.change_run") and clerk.has_module_perms("audit")
    for library_permission in (
        "account.view_emailaddress",
        "mfa.view_authenticator",
        "django_celery_beat.change_periodictask",
    ):
        assert not clerk.has_perm(library_permission) and root.has_perm(library_permission)
    assert not verified_person().has_perm("runs.view_run")


def test_ban_ends_sessions_revokes_machines_and_shows_the_reason(
    verified_person, volunteer, valkey
):
    ada, root = verified_person(), verified_person("root@example.org", is_staff=True)
    machine = volunteer(ada)
    client = Client()
    client.force_login(ada)
    assert ada.ban(root, "spam <b>") and not ada.ban(root, "again")
    assert client.get("/account/").status_code == 302, "signed out"
    assert machine.send_request("GET", "/runs").status_code == 403
    assert Machine.objects.get().revoked_reason == "spam <b>"
    refused = client.post("/accounts/login/", {"login": "ada@example.org", "password": PASSWORD})
    assert refused.status_code == 403 and "spam &lt;b&gt;" in refused.content.decode()
    wrong = Client().post(
        "/accounts/login/", {"login": "ada@example.org", "password": "wrong-barn-9"}
    )
    assert "spam" not in wrong.content.decode(), "the reason is shown only with the right password"
    assert ada.unban(root) and not ada.unban(root)
    accepted = client.post("/accounts/login/", {"login": "ada@example.org", "password": PASSWORD})
    assert accepted.status_code == 302
    assert AuditEntry.objects.get(action="user.ban").detail == {"reason": "spam <b>"}


# ---- the account page and deletion


def test_account_form_changes_the_name(verified_person, valkey):
    ada = verified_person()
    client = Client()
    client.force_login(ada)
    assert client.post("/account/", {"name": "  Ada \u202e Lovelace "}).status_code == 302
    assert User.objects.get().name == "Ada Lovelace"
    long = client.post("/account/", {"name": "x" * 61})
    assert long.status_code == 422 and f'value="{"x" * 61}"' in long.content.decode()


def all_rows_as_text() -> str:
    """Return every row of every table as text."""
    with connection.cursor() as cursor:
        row_texts = []
        for table in connection.introspection.table_names(cursor):
            cursor.execute(f'SELECT "{table}"::text FROM "{table}"')
            row_texts += [row[0] for row in cursor.fetchall()]
    return "\n".join(row_texts)


@pytest.mark.usefixtures("run_queued_tasks", "valkey")
def test_deleted_account_leaves_no_personal_data(
    verified_person, launched_run, draft, numbered_report, golden_hardware
):
    ada = verified_person("ada.lovelace@example.org", name="Ada Lovelace")
    bob = verified_person("bob@example.org", name="Bob")
    run, machine = launched_run(ada, name="Engine")
    draft(ada, name="Secret plans")
    Machine.objects.filter(pk=machine.machine.pk).update(
        hostname="adas-attic", processor="Analytical Engine"
    )
    machine.report(run, numbered_report(1, addresses=["203.0.113.77:4000"]))
    run.update_join_policy(JoinPolicy(notes="Ada Lovelace wrote this"), actor=ada)
    RunInvitation.create(run, "for Ada Lovelace's friends", actor=ada)
    Token.create(ada, "Ada Lovelace's script", ["runs:read"], 90)
    HardwareMeasurement.record(
        machine.machine, golden_hardware.model_copy(update={"name": "Analytical Engine"})
    )
    team = Team.create("Weavers", ada)
    team.add_member(bob, ada)
    TOTP.activate(ada, generate_totp_secret())
    client = Client()
    client.post("/accounts/login/", {"login": ada.email, "password": PASSWORD})
    client.force_login(ada)
    before = all_rows_as_text()
    for personal_text in ("ada.lovelace@example.org", "Ada Lovelace", "adas-attic", "Secret plans"):
        assert personal_text in before

    assert client.post("/account/delete/", {"email": "wrong@example.org"}).status_code == 302, (
        "deletion requires a recent login"
    )
    delete_account(ada, ada)

    after = all_rows_as_text()
    for personal_text in (
        "ada.lovelace",
        "Ada Lovelace",
        "adas-attic",
        "Analytical",
        "203.0.113.77",
        "Secret plans",
    ):
        assert personal_text not in after, personal_text
    assert not Authenticator.objects.exists() and not Enrolment.objects.exists()
    assert client.get("/account/").status_code == 302
    fresh = Client()
    answer = fresh.post(
        "/accounts/login/", {"login": "ada.lovelace@example.org", "password": PASSWORD}
    )
    assert answer.status_code == 200 and "_auth_user_id" not in fresh.session
    run_page = page(Client().get(f"/runs/{run.slug}/"))
    assert "somebody who left" in run_page and "Engine" in run_page
    assert machine.send_request("GET", "/runs").status_code == 403
    assert team.members.get().person == bob and team.members.get().leads
    new_account = verified_person("ada.lovelace@example.org")
    assert new_account.pk != ada.pk, "the address is free again"


def test_account_deletion_requires_typed_address_and_password(verified_person, valkey):
    verified_person()
    client = Client()
    client.post("/accounts/login/", {"login": "ada@example.org", "password": PASSWORD})
    assert "reauthenticate" in client.get("/account/delete/")["Location"]
    client.post("/accounts/reauthenticate/", {"password": PASSWORD})
    assert "What is deleted" in page(client.get("/account/delete/"))
    wrong = client.post("/account/delete/", {"email": "eve@example.org"})
    assert wrong.status_code == 422 and 'value="eve@example.org"' in wrong.content.decode()
    assert User.objects.get().is_active
    deleted = client.post("/account/delete/", {"email": "Ada@example.org"}, follow=True)
    assert "Your account is deleted" in page(deleted)
    assert User.objects.get().left and "_auth_user_id" not in client.session


def test_run_of_a_deleted_owner_can_end_without_the_owner(verified_person, launched_run):
    from coordinator.fleet.lifecycle_facts import gather_facts

    run, _ = launched_run(verified_person())
    assert not gather_facts(run).owner_safe
    delete_account(run.owner, run.owner)
    run.refresh_from_db()
    assert gather_facts(run).owner_safe
