"""Test teams: founding, invitations, leading and leaving."""

import re
from datetime import timedelta

import pytest
from django.conf import settings
from django.core import mail
from django.test import Client
from django.utils import timezone
from helpers.site.pages import text as page

from coordinator.accounts import tasks, teams
from coordinator.accounts.models import Team, TeamInvitation, UserError
from coordinator.audit.models import AuditEntry

pytestmark = pytest.mark.django_db


def send_invitation(
    client: Client, team: Team, run_queued_tasks, email: str = "bob@example.org"
) -> str:
    """Send an invitation and return the path of its link."""
    assert client.post(f"/teams/{team.slug}/invite/", {"email": email}).status_code == 302
    mail.outbox.clear()
    run_queued_tasks()
    (message,) = mail.outbox
    assert message.to == [email]
    return re.search(rf"{settings.SITE_URL}(/teams/invitations/\S+)", message.body)[1]


def test_founder_of_a_team_leads_it(signed_in, valkey):
    client, ada = signed_in(name="Ada")
    answer = client.post("/teams/new/", {"name": "  The   Weavers "}, follow=True)
    team = Team.objects.get()
    assert (team.name, team.slug, team.may_lead(ada)) == ("The Weavers", "the-weavers", True)
    assert "The Weavers" in page(answer) and "Invite a person" in page(answer)
    assert "The Weavers" in page(Client().get("/teams/"))
    assert "Ada" in page(Client().get("/teams/the-weavers/"))
    assert "Invite" not in page(Client().get("/teams/the-weavers/")), "visitors cannot invite"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "1 to 60"),
        ("x" * 61, "1 to 60"),
        ("\u202e \u200b", "1 to 60"),
        ("the weavers", "already"),
    ],
)
def test_invalid_team_form_keeps_the_input_and_shows_the_problem(signed_in, valkey, name, problem):
    client, ada = signed_in()
    Team.create("The Weavers", ada)
    answer = client.post("/teams/new/", {"name": name})
    assert answer.status_code == 422 and problem in page(answer)
    assert not name.isascii() or f'value="{name}"' in answer.content.decode() or not name
    assert Team.objects.count() == 1


def test_team_name_with_markup_or_reserved_word_gets_a_safe_slug(signed_in, valkey):
    client, _ = signed_in()
    for name in ("New", "Invitations", "<script>alert(1)</script>", "織り手 🧵"):
        answer = client.post("/teams/new/", {"name": name}, follow=True)
        assert answer.status_code == 200 and "<script>alert" not in answer.content.decode()
    assert len(set(Team.objects.values_list("slug", flat=True))) == 4
    assert not {"new", "invitations"} & set(Team.objects.values_list("slug", flat=True))
    weavers = Team.objects.get(slug="織り手")
    assert client.get(weavers.get_absolute_url()).status_code == 200
    assert client.get("/teams/織り手/").status_code == 200
    assert client.get("/teams/%00/").status_code == 404


def test_invitation_link_admits_one_person_once(signed_in, run_queued_tasks, valkey):
    leader, ada = signed_in(name="Ada <b>")
    client, bob = signed_in("bob@example.org", name="Bob")
    team = Team.create("Weavers", ada)
    link = send_invitation(leader, team, run_queued_tasks)
    assert "Weavers" in mail.outbox[0].subject and "Ada <b>" in mail.outbox[0].body
    visitor = Client()
    shown = page(visitor.get(link))
    assert "Join Weavers" in shown and "Create an account to accept" in shown
    assert "/accounts/login/" in visitor.post(link, {"answer": "join"})["Location"]
    assert "Join Weavers" in page(client.get(link)) and team.members.count() == 1, (
        "opening the link joined the team"
    )
    assert "You joined Weavers" in page(client.post(link, {"answer": "join"}, follow=True))
    assert team.members.filter(person=bob, leads=False).exists()
    eve, _ = signed_in("eve@example.org")
    assert eve.post(link, {"answer": "join"}).status_code == 404, "the link was accepted twice"
    assert not TeamInvitation.objects.exists(), "the address is still stored"


def test_declined_withdrawn_replaced_or_expired_link_is_refused(
    signed_in, run_queued_tasks, valkey
):
    leader, ada = signed_in()
    bob, _ = signed_in("bob@example.org")
    team = Team.create("Weavers", ada)
    link = send_invitation(leader, team, run_queued_tasks)
    bob.post(link, {"answer": "no"})
    assert bob.get(link).status_code == 404

    link = send_invitation(leader, team, run_queued_tasks)
    leader.post(
        f"/teams/{team.slug}/withdraw-invitation/", {"id": str(TeamInvitation.objects.get().pk)}
    )
    assert bob.get(link).status_code == 404

    replaced_link = send_invitation(leader, team, run_queued_tasks)
    newer_link = send_invitation(leader, team, run_queued_tasks)
    assert bob.get(replaced_link).status_code == 404 and bob.get(newer_link).status_code == 200, (
        "the replaced link still works"
    )
    TeamInvitation.objects.update(expires=timezone.now() - timedelta(seconds=1))
    assert bob.post(newer_link, {"answer": "join"}).status_code == 404
    assert team.members.count() == 1


def test_invitations_above_the_daily_limit_are_refused(signed_in, valkey):
    leader, ada = signed_in()
    team = Team.create("Weavers", ada)
    for n in range(teams.MAX_INVITATIONS_PER_DAY):
        TeamInvitation.send(team, f"{n}@example.org", ada)
    answer = leader.post(f"/teams/{team.slug}/invite/", {"email": "more@example.org"})
    assert answer.status_code == 422
    assert "tomorrow" in page(answer)
    assert "more@example.org" in answer.content.decode()


def test_line_break_in_name_or_address_reaches_no_email_header(signed_in, run_queued_tasks, valkey):
    leader, ada = signed_in(name="Ada\nBcc: all@example.org")
    team = Team.create("Weavers", ada)
    answer = leader.post(
        f"/teams/{team.slug}/invite/", {"email": "bob@example.org\nBcc: eve@example.org"}
    )
    assert answer.status_code == 422
    send_invitation(leader, team, run_queued_tasks)
    assert "\n" not in mail.outbox[0].subject
    assert tasks.send_email.max_retries > 5, (
        "emails are lost if the mail server is away for an hour"
    )


def test_only_team_leaders_rename_invite_and_remove(signed_in, valkey):
    _, ada = signed_in()
    member, bob = signed_in("bob@example.org")
    stranger, _ = signed_in("eve@example.org")
    team = Team.create("Weavers", ada)
    team.add_member(bob, ada)
    membership = team.members.get(person=ada)
    for client in (member, stranger):
        for action, form in (
            ("rename", {"name": "Ours now"}),
            ("invite", {"email": "x@example.org"}),
            ("promote", {"id": membership.pk}),
            ("withdraw-invitation", {"id": membership.pk}),
            ("leave", {"id": membership.pk}),
        ):
            assert client.post(f"/teams/{team.slug}/{action}/", form).status_code == 403, action
    team.refresh_from_db()
    assert team.name == "Weavers" and team.members.count() == 2


def test_last_leader_is_succeeded_and_empty_team_is_deleted(signed_in, valkey):
    leader, ada = signed_in(name="Ada")
    client, bob = signed_in("bob@example.org", name="Bob")
    _, eve = signed_in("eve@example.org")
    team = Team.create("Weavers", ada)
    team.add_member(bob, ada)
    team.add_member(eve, ada)
    assert leader.post(f"/teams/{team.slug}/leave/").status_code == 302
    assert team.may_lead(bob) and not team.may_lead(eve) and not team.may_lead(ada)
    client.post(f"/teams/{team.slug}/leave/", {"id": str(team.members.get(person=eve).pk)})
    assert team.members.count() == 1
    client.post(f"/teams/{team.slug}/leave/")
    assert not Team.objects.exists()
    actions = list(
        AuditEntry.objects.filter(subject_kind="team")
        .order_by("id")
        .values_list("action", flat=True)
    )
    assert actions == [
        "team.create",
        "team.join",
        "team.join",
        "team.leave",
        "team.promote",
        "team.remove",
        "team.leave",
        "team.disband",
    ]


def test_memberships_above_the_team_limit_are_refused(signed_in, valkey):
    _, ada = signed_in()
    for n in range(teams.MAX_TEAMS_PER_PERSON):
        Team.create(f"Team {n}", ada)
    with pytest.raises(UserError, match="leave one first"):
        Team.create("One more", ada)


def test_rename_keeps_the_slug_and_reports_taken_names(signed_in, valkey):
    leader, ada = signed_in()
    team = Team.create("Weavers", ada)
    Team.create("Smiths", ada)
    leader.post(f"/teams/{team.slug}/rename/", {"name": "Spinners"})
    assert "Spinners" in page(leader.get("/teams/weavers/"))
    answer = leader.post(f"/teams/{team.slug}/rename/", {"name": "smiths"})
    assert answer.status_code == 422
    assert "already" in page(answer)
    assert 'value="smiths"' in answer.content.decode()
