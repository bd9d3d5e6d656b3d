"""Test who may create an account, under each policy of the staff."""

import pytest
from django.core.exceptions import ValidationError
from django.test import Client

from coordinator.accounts.models import SiteSettings, Team, TeamInvitation, User
from coordinator.audit.models import AuditEntry
from coordinator.runs.invitations import RunInvitation

pytestmark = pytest.mark.django_db
PASSWORD = "wooden-barn-9"


def sign_up(email: str = "new@example.org", following: str = "") -> str:
    """Send the sign-up form; return the page that answers, or "" for a redirect."""
    fields = {"email": email, "password1": PASSWORD, "name": "New", "next": following}
    return Client().post("/accounts/signup/", fields).content.decode()


@pytest.fixture
def staff(person, valkey, built_frontend):
    return person("root@example.org", is_staff=True)


def test_open_site_lets_everybody_sign_up(staff):
    assert "Create account" in Client().get("/accounts/signup/").content.decode()
    sign_up()
    assert User.objects.filter(email="new@example.org").exists()


def test_closed_site_says_so_and_creates_no_account(staff):
    assert SiteSettings.set_sign_up("closed", "", staff)
    assert not SiteSettings.set_sign_up("closed", "", staff)
    assert AuditEntry.objects.filter(action="site.sign_up").count() == 1
    page = Client().get("/accounts/signup/").content.decode()
    assert "accepts no new accounts" in page and "<form class" not in page
    assert "accepts no new accounts" in sign_up()
    assert not User.objects.filter(email="new@example.org").exists()


def test_invited_site_needs_a_valid_invitation(staff, person, draft):
    SiteSettings.set_sign_up("invited", "", staff)
    assert "for invited people" in sign_up()
    run = draft(person("ada@example.org"))
    invitation = RunInvitation.create(run)
    link = f"/runs/{run.slug}/invited/{invitation.token}/"
    assert "Create account" in Client().get("/accounts/signup/", {"next": link}).content.decode()
    for wrong in (f"/runs/{run.slug}/invited/wrong/", "/runs/", "/teams/invitations/wrong/"):
        assert "for invited people" in sign_up(following=wrong)
    sign_up(following=link)
    assert User.objects.filter(email="new@example.org").exists()
    _, token = TeamInvitation.send(Team.create("Weavers", run.owner), "b@example.org", run.owner)
    sign_up("b@example.org", f"/teams/invitations/{token}/")
    assert User.objects.filter(email="b@example.org").exists()
    invitation.withdraw()
    assert "for invited people" in sign_up("c@example.org", link)


def test_site_for_domains_refuses_other_addresses(staff):
    SiteSettings.set_sign_up("domains", "@Example.org, school.test", staff)
    page = sign_up("new@elsewhere.test")
    assert "need an email address of example.org, school.test" in page
    assert "need an email" in sign_up("new@sub.example.org")
    sign_up("new@EXAMPLE.org")
    assert User.objects.count() == 2


def test_policy_of_domains_needs_one():
    with pytest.raises(ValidationError, match="at least one domain"):
        SiteSettings(sign_up="domains", sign_up_domains=" , ").clean()
