"""The staff's door, and what it opens."""

import pytest
from allauth.account.models import EmailAddress
from django.test import Client

from barnraise import wire
from coordinator.accounts.models import Machine

pytestmark = pytest.mark.django_db
PASSWORD = "wooden-barn-9"


@pytest.fixture
def staff(person, client) -> Client:
    client.force_login(person("root@example.org", is_staff=True, is_superuser=True))
    return client


def act(client: Client, model: str, action: str, pk: object) -> str:
    answer = client.post(f"/admin/{model}/", {"action": action, "_selected_action": str(pk)}, follow=True)
    assert answer.status_code == 200
    return " ".join(str(m) for m in answer.context["messages"])


def test_staff_pause_resume_and_finish_a_run(staff, person, launched):
    run, _ = launched(person())
    assert "Paused" in act(staff, "runs/run", "pause", run.pk)
    run.refresh_from_db()
    assert run.state is wire.Status.PAUSED
    assert "nothing to pause" in act(staff, "runs/run", "pause", run.pk)
    act(staff, "runs/run", "resume", run.pk)
    act(staff, "runs/run", "finish", run.pk)
    run.refresh_from_db()
    assert run.state is wire.Status.FINISHED


def test_staff_revoke_a_machine(staff, person, volunteer):
    machine = volunteer(person()).machine
    assert "Revoked 1" in act(staff, "accounts/machine", "revoke", machine.pk)
    assert Machine.objects.get().revoked


def test_every_admin_page_opens(staff, person, launched):
    run, ada = launched(person())
    for path in (
        "",
        "accounts/user/",
        "accounts/user/add/",
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


def test_the_admin_cannot_write_a_status_past_the_lifecycle(staff, person, launched):
    run, _ = launched(person())
    fields = {"name": "Renamed", "quorum": 1, "report_every": 1, "status": "finished", "ledger_tokens": 5}
    staff.post(f"/admin/runs/run/{run.pk}/change/", fields)
    run.refresh_from_db()
    assert run.name == "Renamed" and run.state is wire.Status.TRAINING and run.ledger_tokens == 0


@pytest.mark.parametrize("email", [None, "ada@example.org"])
def test_nobody_but_staff_enters_the_admin(client, person, launched, email):
    run, _ = launched(person())
    if email:
        client.force_login(run.owner)
    for method in (client.get, client.post):
        answer = method("/admin/runs/run/", {"action": "finish", "_selected_action": str(run.pk)})
        assert answer.status_code in (302, 403)
    run.refresh_from_db()
    assert run.state is wire.Status.TRAINING


def test_people_log_in_by_address_and_password_in_any_case(client, person, valkey):
    user = person()
    EmailAddress.objects.create(user=user, email=user.email, verified=True, primary=True)
    answer = client.post("/accounts/login/", {"login": "Ada@Example.org", "password": PASSWORD})
    assert answer.status_code == 302 and client.session["_auth_user_id"] == str(user.pk)


def test_a_wrong_password_is_told_and_logs_nobody_in(client, person, valkey):
    person()
    answer = client.post("/accounts/login/", {"login": "ada@example.org", "password": "wrong"})
    assert answer.status_code == 200 and "_auth_user_id" not in client.session


def test_signing_up_takes_a_name_that_others_see_and_never_shows_the_address(client, db, valkey):
    from coordinator.accounts.models import User

    fields = {"email": "Eve@Example.org", "password1": "wooden-barn-9", "name": " Eve "}
    assert client.post("/accounts/signup/", fields).status_code == 302
    eve = User.objects.get(email__iexact="eve@example.org")
    assert eve.shown_name == "Eve"
    eve.name = ""
    assert "@" not in eve.shown_name and "eve" not in eve.shown_name


def test_pages_and_admin_say_what_browsers_may_load(client, staff):
    assert "script-src 'self';" in client.get("/accounts/login/")["Content-Security-Policy"] + ";"
    assert "unsafe-eval" not in Client().get("/accounts/login/")["Content-Security-Policy"]
    assert "unsafe-eval" in staff.get("/admin/")["Content-Security-Policy"]
