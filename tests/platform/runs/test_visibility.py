"""Test who finds and who sees public, unlisted and hidden runs."""

import pytest
from django.contrib.auth.models import AnonymousUser
from django.test import Client
from django.utils import timezone
from helpers.site.pages import open_client

from barnraise.errors import SpecError
from barnraise.protocol.messages import Ticket
from coordinator.accounts.models import Team
from coordinator.credit.models import Credit
from coordinator.runs.invitations import RunInvitation
from coordinator.runs.join_policy import JoinPolicy
from coordinator.runs.models import Run
from coordinator.runs.tickets import sign_ticket


def listed(user) -> bool:
    return Run.objects.listed_for(user).exists()


def test_unlisted_run_is_seen_by_its_address_and_listed_to_participants(
    person, launched_run, volunteer
):
    ada, bob, root = person(), person("bob@example.org"), person("root@example.org", is_staff=True)
    run, _ = launched_run(ada)
    run.update_join_policy(JoinPolicy(visibility="unlisted"))
    visitor = AnonymousUser()
    assert run.may_see(visitor) and run.may_see(bob)
    assert listed(ada) and listed(root) and not listed(bob) and not listed(visitor)
    page = Client().get(f"/runs/{run.slug}/").content.decode()
    assert '<meta name="robots" content="noindex">' in page
    assert run.name not in Client().get("/runs/").content.decode()
    assert run.name not in Client().get("/").content.decode()
    volunteer(bob, 2).join(run)
    assert listed(bob), "somebody with a machine in the run finds it in the list"


def test_address_of_an_unlisted_run_leaks_through_no_other_page(
    person, launched_run, built_frontend
):
    """A fork of it is public, and a volunteer's certificate lists what it trained."""
    ada, bob = person(), person("bob@example.org")
    run, machine = launched_run(ada, name="Whisper")
    fork, _ = launched_run(bob, seed=2, name="Loud")
    Run.objects.filter(pk=fork.pk).update(parent=run)
    Credit.objects.create(
        run=run,
        machine=machine.machine,
        incarnation="a" * 16,
        first=1,
        last=2,
        tokens=2000,
        day=timezone.now().date(),
    )
    pages = (f"/runs/{fork.slug}/", f"/volunteers/{ada.pk}/")
    assert all(run.slug in Client().get(page).content.decode() for page in pages)
    run.update_join_policy(JoinPolicy(visibility="unlisted"))
    assert not any(run.slug in Client().get(page).content.decode() for page in pages)
    own = open_client(ada)
    assert all(run.slug in own.get(page).content.decode() for page in pages)


def test_ticket_says_whom_the_runs_owner_has_let_in(person, launched_run, volunteer):
    ada, guest, member, stranger = (person(f"{n}@example.org") for n in ("a", "g", "m", "s"))
    run, machine = launched_run(ada)
    RunInvitation.create(run).accept(guest)
    team = Team.create("Oaks", member)
    people = {"owner": ada, "invited": guest, "stranger": stranger}
    assert {name: run.standing_of(one) for name, one in people.items()} == {n: n for n in people}
    run.update_join_policy(JoinPolicy(access="team", team=team.pk))
    assert run.standing_of(member) == "invited" and run.standing_of(stranger) == "stranger"
    signed = sign_ticket(run, machine.machine, 1)
    assert Ticket.model_validate_json(signed.body).standing == "owner"


def test_hidden_run_exists_for_participants_only(person, launched_run, volunteer):
    ada, bob, eve = person(), person("bob@example.org"), person("eve@example.org")
    root = person("root@example.org", is_staff=True)
    run, _ = launched_run(ada)
    policy = JoinPolicy(access="invitation", visibility="invited")
    run.update_join_policy(policy)
    assert not run.is_public
    for somebody in (AnonymousUser(), bob, eve):
        assert not run.may_see(somebody) and not listed(somebody)
    assert Client().get(f"/runs/{run.slug}/").status_code == 404
    assert Client().get(f"/live/{run.pk}/").status_code == 404
    eves = volunteer(eve, 3)
    assert eves.send_request("GET", f"/runs/{run.slug}").status_code == 404
    RunInvitation.create(run).accept(bob)
    assert run.may_see(bob) and listed(bob) and run.may_see(ada) and run.may_see(root)
    assert volunteer(bob, 4).send_request("GET", f"/runs/{run.slug}").status_code == 200
    client = open_client(bob)
    assert client.get(f"/runs/{run.slug}/").status_code == 200


def test_hidden_run_of_a_team_is_seen_by_its_members(person, launched_run):
    ada, bob = person(), person("bob@example.org")
    run, _ = launched_run(ada)
    team = Team.create("Weavers", ada)
    run.update_join_policy(JoinPolicy(access="team", team=team.pk, visibility="invited"))
    assert not run.may_see(bob)
    team.add_member(bob, ada)
    assert run.may_see(bob) and listed(bob)


def test_run_that_anyone_may_join_cannot_be_hidden(person, draft):
    run = draft(person())
    with pytest.raises(SpecError) as refused:
        run.update_join_policy(JoinPolicy(visibility="invited"))
    assert "cannot be hidden" in refused.value.problems["visibility"]
    with pytest.raises(SpecError):
        run.update_join_policy(JoinPolicy(visibility="secret"))
