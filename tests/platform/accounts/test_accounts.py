"""Accounts: signing up with a verified address, second factors, roles, bans, and leaving for good."""

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
from django.core import mail
from django.db import connection
from django.test import Client
from helpers.pages import text as page

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
def known(person):
    """A person with a verified address, who can log in."""

    def make(email: str = "ada@example.org", **fields) -> User:
        user = person(email, **fields)
        EmailAddress.objects.create(user=user, email=email, verified=True, primary=True)
        return user

    return make


# ---- signing up ----------------------------------------------------------------------------------------------------


def test_signing_up_takes_the_code_that_came_by_mail(run_queued_tasks, valkey):
    client = Client()
    answer = client.post("/accounts/signup/", EVE)
    assert answer.status_code == 302 and "confirm-email" in answer["Location"]
    assert "_auth_user_id" not in client.session, "not before the address is verified"
    run_queued_tasks()
    (letter,) = mail.outbox
    assert letter.to == ["eve@example.org"]
    code = re.search(r"^\s*([A-Z0-9]{3,}-?[A-Z0-9]{3,})\s*$", letter.body, re.M)[1]
    wrong = client.post("/accounts/confirm-email/", {"code": "NOT-IT"})
    assert wrong.status_code == 200 and "_auth_user_id" not in client.session
    assert client.post("/accounts/confirm-email/", {"code": code}).status_code == 302
    eve = User.objects.get(email="eve@example.org")
    assert client.session["_auth_user_id"] == str(eve.pk) and eve.shown_name == "Eve"
    assert EmailAddress.objects.get(user=eve).verified
    assert AuditEntry.objects.filter(action="user.sign_up", subject_id=str(eve.pk)).exists()


def test_an_address_that_is_known_and_one_that_is_not_are_answered_alike(
    known, run_queued_tasks, valkey
):
    known("ada@example.org")
    told = []
    for email in ("ada@example.org", "new@example.org"):
        client = Client()
        answer = client.post("/accounts/signup/", {**EVE, "email": email})
        told.append(
            (
                answer.status_code,
                answer["Location"],
                re.sub(email, "", page(client.get(answer["Location"]))),
            )
        )
    assert told[0] == told[1]
    told = []
    for email in ("ada@example.org", "nobody@example.org"):
        client = Client()
        answer = client.post("/accounts/password/reset/", {"email": email})
        told.append((answer.status_code, answer["Location"]))
        wrong = client.post("/accounts/login/", {"login": email, "password": "wrong-barn-9"})
        told.append((wrong.status_code, re.findall(r'role="alert">(.*?)<', wrong.content.decode())))
    assert told[:2] == told[2:]
    run_queued_tasks()
    subjects = {letter.to[0]: letter.subject for letter in mail.outbox}
    assert subjects.keys() == {"ada@example.org", "new@example.org", "nobody@example.org"}


def test_guessing_passwords_is_slowed_down(known, valkey):
    known()
    client = Client()
    answers = [
        client.post("/accounts/login/", {"login": "ada@example.org", "password": f"guess-{n}"})
        for n in range(7)
    ]
    assert any("Too many failed" in page(answer) for answer in answers)
    right = client.post("/accounts/login/", {"login": "ada@example.org", "password": PASSWORD})
    assert "_auth_user_id" not in client.session, "not even the right one, for now"
    assert right.status_code in (200, 429)


def test_a_forgotten_password_is_set_anew_by_the_link_that_came_by_mail(
    known, run_queued_tasks, valkey
):
    known()
    client = Client()
    client.post("/accounts/password/reset/", {"email": "ada@example.org"})
    run_queued_tasks()
    link = re.search(r"http://testserver(\S+)", mail.outbox[0].body)[1]
    form = client.get(link, follow=True)
    answer = client.post(
        form.request["PATH_INFO"], {"password1": "a-new-barn-11", "password2": "a-new-barn-11"}
    )
    assert answer.status_code == 302
    again = Client().post(
        "/accounts/login/", {"login": "ada@example.org", "password": "a-new-barn-11"}
    )
    assert again.status_code == 302
    assert AuditEntry.objects.filter(action="user.password_reset").exists()


def test_with_a_second_factor_the_password_alone_is_not_enough(known, valkey):
    ada, secret = known(), generate_totp_secret()
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


# ---- roles and rules -----------------------------------------------------------------------------------------------


def test_everybody_creates_runs_until_the_staff_say_otherwise(known):
    ada, root = known(), known("root@example.org", is_staff=True)
    assert (ada.role, root.role) == ("organiser", "staff")
    assert SiteSettings.set_organisers("granted", root) and not SiteSettings.set_organisers(
        "granted", root
    )
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


def test_only_a_superuser_makes_staff_and_nobody_unmakes_themselves(known):
    ada, root = known(), known("root@example.org", is_staff=True, is_superuser=True)
    clerk = known("clerk@example.org", is_staff=True)
    with pytest.raises(UserError, match="superuser"):
        ada.grant("is_staff", clerk)
    with pytest.raises(UserError, match="themselves"):
        root.grant("is_staff", root, given=False)
    assert ada.grant("is_staff", root)
    with pytest.raises(UserError, match="superuser"):
        ada.ban(clerk, "a quarrel")


def test_staff_may_what_is_the_sites_and_superusers_everything(known):
    clerk, root = (
        known("clerk@example.org", is_staff=True),
        known("r@example.org", is_staff=True, is_superuser=True),
    )
    assert clerk.has_perm("runs.change_run") and clerk.has_module_perms("audit")
    for foreign in (
        "account.view_emailaddress",
        "mfa.view_authenticator",
        "django_celery_beat.change_periodictask",
    ):
        assert not clerk.has_perm(foreign) and root.has_perm(foreign)
    assert not known().has_perm("runs.view_run")


def test_a_ban_ends_sessions_and_revokes_machines_and_says_why(known, volunteer, valkey):
    ada, root = known(), known("root@example.org", is_staff=True)
    machine, client = volunteer(ada), Client()
    client.force_login(ada)
    assert ada.ban(root, "spam <b>") and not ada.ban(root, "again")
    assert client.get("/account/").status_code == 302, "signed out"
    assert machine.send_request("GET", "/runs").status_code == 403
    assert Machine.objects.get().revoked_reason == "spam <b>"
    shut = client.post("/accounts/login/", {"login": "ada@example.org", "password": PASSWORD})
    assert shut.status_code == 403 and "spam &lt;b&gt;" in shut.content.decode()
    wrong = Client().post(
        "/accounts/login/", {"login": "ada@example.org", "password": "wrong-barn-9"}
    )
    assert "spam" not in wrong.content.decode(), "only who knows the password is told"
    assert ada.unban(root) and not ada.unban(root)
    assert (
        client.post(
            "/accounts/login/", {"login": "ada@example.org", "password": PASSWORD}
        ).status_code
        == 302
    )
    assert AuditEntry.objects.get(action="user.ban").detail == {"reason": "spam <b>"}


# ---- their own page, and the way out -------------------------------------------------------------------------------


def test_a_person_changes_their_name(known, valkey):
    ada, client = known(), Client()
    client.force_login(ada)
    assert client.post("/account/", {"name": "  Ada \u202e Lovelace "}).status_code == 302
    assert User.objects.get().name == "Ada Lovelace"
    long = client.post("/account/", {"name": "x" * 61})
    assert long.status_code == 422 and f'value="{"x" * 61}"' in long.content.decode()


def everything() -> str:
    """Every row of every table, as text."""
    with connection.cursor() as cursor:
        found = []
        for table in connection.introspection.table_names(cursor):
            cursor.execute(f'SELECT "{table}"::text FROM "{table}"')
            found += [row[0] for row in cursor.fetchall()]
    return "\n".join(found)


def test_who_leaves_takes_all_that_is_personal_along(
    known, launched_run, draft, numbered_report, run_queued_tasks, valkey, golden_hardware
):
    ada = known("ada.lovelace@example.org", name="Ada Lovelace")
    bob = known("bob@example.org", name="Bob")
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
    before = everything()
    for told in ("ada.lovelace@example.org", "Ada Lovelace", "adas-attic", "Secret plans"):
        assert told in before

    assert client.post("/account/delete/", {"email": "wrong@example.org"}).status_code == 302, (
        "first prove it is you"
    )
    delete_account(ada, ada)

    after = everything()
    for gone in (
        "ada.lovelace",
        "Ada Lovelace",
        "adas-attic",
        "Analytical",
        "203.0.113.77",
        "Secret plans",
    ):
        assert gone not in after, gone
    assert not Authenticator.objects.exists() and not Enrolment.objects.exists()
    assert client.get("/account/").status_code == 302
    fresh = Client()
    answer = fresh.post(
        "/accounts/login/", {"login": "ada.lovelace@example.org", "password": PASSWORD}
    )
    assert answer.status_code == 200 and "_auth_user_id" not in fresh.session
    shown = page(Client().get(f"/runs/{run.slug}/"))
    assert "somebody who left" in shown and "Engine" in shown
    assert machine.send_request("GET", "/runs").status_code == 403
    assert team.members.get().person == bob and team.members.get().leads
    again = known("ada.lovelace@example.org")
    assert again.pk != ada.pk, "the address is free again"


def test_leaving_is_typed_and_asks_for_the_password_again(known, valkey):
    known()
    client = Client()
    client.post("/accounts/login/", {"login": "ada@example.org", "password": PASSWORD})
    assert "reauthenticate" in client.get("/account/delete/")["Location"]
    client.post("/accounts/reauthenticate/", {"password": PASSWORD})
    assert "What is deleted" in page(client.get("/account/delete/"))
    wrong = client.post("/account/delete/", {"email": "eve@example.org"})
    assert wrong.status_code == 422 and 'value="eve@example.org"' in wrong.content.decode()
    assert User.objects.get().is_active
    gone = client.post("/account/delete/", {"email": "Ada@example.org"}, follow=True)
    assert "Your account is deleted" in page(gone)
    assert User.objects.get().left and "_auth_user_id" not in client.session


def test_a_run_whose_owner_left_ends_when_others_hold_its_model(known, launched_run):
    from coordinator.fleet.lifecycle_facts import gather_facts

    run, _ = launched_run(known())
    assert not gather_facts(run).owner_safe
    delete_account(run.owner, run.owner)
    run.refresh_from_db()
    assert gather_facts(run).owner_safe
