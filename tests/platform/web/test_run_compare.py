"""Test the page that compares runs, and the tree of forks."""

import json
import re
from datetime import timedelta
from html import unescape

import pytest
from django.contrib.auth.models import AnonymousUser
from django.test import Client
from django.utils import timezone
from helpers.site.pages import open_client

from coordinator.runs.drafts import NewRun
from coordinator.runs.models import Run
from coordinator.runs.spec_form import spec_from_fields
from coordinator.telemetry.run_cards import describe_progress
from coordinator.web.run_compare_views import differing_settings, find_families

pytestmark = pytest.mark.django_db


@pytest.fixture
def family(person) -> dict[str, Run]:
    """Create a run, two forks of it, and a fork of one of these; all are drafts of one owner."""
    owner = person()
    runs: dict[str, Run] = {}
    for name, parent, rate in (
        ("first", None, "0.001"),
        ("second", "first", "0.002"),
        ("third", "first", "0.001"),
        ("grandchild", "second", "0.002"),
    ):
        spec = spec_from_fields({"recipe.learning_rate": rate, "seed": "7"})
        runs[name] = Run.create(owner, NewRun(name, spec, parent=runs.get(parent or "")))
    return runs


def test_settings_that_differ_are_named_with_each_value(family):
    rows = dict(differing_settings([family["first"], family["second"]]))
    assert rows == {"Learning rate": ["0.001", "0.002"]}
    assert differing_settings([family["first"], family["third"]]) == []
    assert differing_settings([]) == []
    longer = spec_from_fields({"recipe.token_budget": "720000", "seed": "7"})
    other = Run.create(family["first"].owner, NewRun("longer", longer))
    budgets = dict(differing_settings([family["first"], other]))["Token budget"]
    assert budgets[1] == "720,000" and "," in budgets[0]


def test_tokens_are_written_without_the_budget_once_it_is_spent(family):
    run = family["first"]
    run.ledger_tokens = run.token_budget - 1
    assert " of " in describe_progress(run)
    run.ledger_tokens = run.token_budget + 7_000
    assert " of " not in describe_progress(run)


def test_runs_that_are_over_have_no_columns_of_now(family):
    client = open_client(family["first"].owner)
    address = f"/runs/compare/?run={family['first'].slug}"
    assert "Machines now" in client.get(address).content.decode()
    family["first"].cancel()
    assert "Machines now" not in client.get(address).content.decode()


def test_tree_of_forks_has_every_relative_once(family):
    owner = family["first"].owner
    [tree] = find_families(owner, [family["grandchild"], family["third"]])
    assert tree.run == family["first"] and not tree.is_compared
    assert [fork.run.name for fork in tree.forks] == ["second", "third"]
    assert [fork.is_compared for fork in tree.forks] == [False, True]
    assert [fork.run.name for fork in tree.forks[0].forks] == ["grandchild"]
    assert find_families(AnonymousUser(), [family["third"]])[0].forks == [], "drafts are private"


def test_compare_page_shows_only_what_the_visitor_may_see(family):
    client = Client()
    names = [run.slug for run in family.values()]
    client.force_login(family["first"].owner)
    html = client.get("/runs/compare/", {"run": names}).content.decode()
    assert "Learning rate" in html
    chart = unescape(html.split('data-compare-runs="')[1].split('"')[0])
    assert [run["name"] for run in json.loads(chart)] == list(family)
    hidden = Client().get("/runs/compare/", {"run": names}).content.decode()
    assert "Learning rate" not in hidden and "4 of the runs do not exist" in hidden


def test_duration_of_an_active_run_ends_now_and_of_another_at_its_end(family):
    client, now = Client(), timezone.now()
    first, second, third = (family[name] for name in ("first", "second", "third"))
    client.force_login(first.owner)
    started = now - timedelta(hours=5)
    Run.objects.filter(pk__in=[first.pk, second.pk]).update(started=started)
    Run.objects.filter(pk=second.pk).update(finished=now - timedelta(hours=2))
    names = [run.slug for run in (first, second, third)]
    html = client.get("/runs/compare/", {"run": names}).content.decode()
    rows = re.findall(r"<tr>\s*<th scope=\"row\"><a.*?</tr>", html, re.DOTALL)
    durations = [re.findall(r"is-number\">(.*?)<", row)[-1] for row in rows]
    assert durations == ["5 h 00 min", "3 h 00 min", "–"]


@pytest.mark.parametrize(
    "names", [[], ["nothing"], ["x" * 500], ["a", "a"], [str(n) for n in range(50)]]
)
def test_compare_page_of_unknown_runs_is_shown(names):
    assert Client().get("/runs/compare/", {"run": names}).status_code == 200
