"""Test credit over time: by day, rank and its change, streaks, shares of a team."""

from datetime import date, timedelta

import pytest
from django.test import Client

from coordinator.accounts.models import Team
from coordinator.credit import progress
from coordinator.credit.models import Credit
from coordinator.lib.ttl_cache import TtlCache

TODAY = date(2026, 11, 25)


def days_ago(*numbers: int) -> list[date]:
    return [TODAY - timedelta(days=n) for n in numbers]


@pytest.mark.parametrize(
    ("days", "current", "longest"),
    [
        ([], 0, 0),
        (days_ago(0), 1, 1),
        (days_ago(1, 2, 3), 3, 3),
        (days_ago(2, 3), 0, 2),
        (days_ago(0, 1, 5, 6, 7, 8), 2, 4),
    ],
)
def test_streaks_count_days_in_a_row_up_to_yesterday(days, current, longest):
    assert progress.streaks(days, TODAY) == (current, longest)


@pytest.fixture
def earn(launched_run, volunteer, person):
    """Return a function that gives a machine's owner credit of one day."""
    run, first = launched_run(person("owner@example.org"))
    machines = {run.owner.pk: first.machine}

    def earn(who, ago: int, tokens: int) -> None:
        if who.pk not in machines:
            machines[who.pk] = volunteer(who, 20 + len(machines)).machine
        day = TODAY - timedelta(days=ago)
        Credit.objects.create(
            run=run,
            machine=machines[who.pk],
            incarnation="a" * 16,
            day=day,
            first=1,
            last=4,
            tokens=tokens,
        )

    earn.run = run
    return earn


@pytest.mark.django_db
def test_rank_changes_within_a_week(earn, person):
    ada, bob, carl = (person(f"{name}@example.org") for name in ("ada", "bob", "carl"))
    assert progress.rank_change(ada, TODAY) is None
    TtlCache.clear_all()  # everybody's credit is cached for a minute
    earn(ada, 10, 100)
    earn(bob, 10, 300)
    earn(ada, 1, 500)
    earn(carl, 0, 50)
    ranked = progress.rank_change(ada, TODAY)
    assert ranked and (ranked.rank, ranked.people, ranked.change) == (1, 3, 1)
    fallen = progress.rank_change(bob, TODAY)
    assert fallen and (fallen.rank, fallen.change, fallen.lost) == (2, -1, 1)
    assert progress.rank_change(carl, TODAY).change is None, "without credit a week ago"
    by_day = progress.tokens_by_day(progress.credit_of(ada), TODAY, days=30)
    assert len(by_day) == 30 and by_day[-2] == (TODAY - timedelta(days=1), 500)
    assert sum(tokens for _, tokens in by_day) == 600


@pytest.mark.django_db
def test_team_page_shows_the_shares_of_its_members(earn, person, valkey, built_frontend):
    ada, bob = person("ada@example.org", name="Ada"), person("bob@example.org", name="Bob")
    team = Team.create("Weavers", ada)
    team.add_member(bob, ada)
    assert "No credit yet" in Client().get(f"/teams/{team.slug}/").content.decode()
    earn(ada, 3, 300)
    earn(bob, 1, 100)
    shares = progress.member_shares(team)
    assert [(share.person, share.share) for share in shares] == [(ada, 0.75), (bob, 0.25)]
    page = Client().get(f"/teams/{team.slug}/").content.decode()
    assert "75 %" in page and "25 %" in page and "Credit of the team by day" in page


@pytest.mark.django_db
def test_certificate_shows_days_rank_and_hides_runs_of_others(earn, person, valkey, built_frontend):
    ada = person("ada@example.org", name="Ada")
    earn(ada, 0, 2_000_000)
    path = f"/volunteers/{ada.pk}/"
    page = Client().get(path).content.decode()
    assert "Credit by day" in page and "Rank, all time" in page and earn.run.name in page
    earn.run.visibility = "invited"
    earn.run.save()
    assert earn.run.get_absolute_url() not in Client().get(path).content.decode()
    assert earn.run.get_absolute_url() not in Client().get("/credit/?by=runs").content.decode()
