"""What the strategy "auto" becomes at launch, with the numbers behind it."""

import dataclasses
import json

import pytest

from barnraise.errors import SpecError
from barnraise.spec import AUTO, Assumptions, RunSpec, problems
from coordinator.runs.join_policy import Access, JoinPolicy
from coordinator.runs.spec_form import spec_from_fields
from coordinator.runs.strategy_choice import resolve_strategy, restore_auto

RACK = {"assumed.line": "10000/10000/0.1", "assumed.machines": 4}


def build_spec(preset: str = "gpt2-124m", **assumed) -> RunSpec:
    """Build a draft with the strategy auto; `machines` changes "assumed.machines"."""
    fields = {f"assumed.{name}": value for name, value in assumed.items()}
    return spec_from_fields({"recipe.strategy": "auto", "seed": 1, **fields}, preset)


def test_auto_becomes_updates_at_home_and_averaging_in_a_cluster():
    home = resolve_strategy(build_spec(), is_open=False)
    assert (home.recipe.strategy, home.recipe.codec) == ("streams", AUTO)
    assert "Updates. Machines compute" in home.assumed.reason
    assert "10 machines (12 GB GPU) on lines of 15 Mb/s up, 112 down" in home.assumed.reason
    rack = resolve_strategy(build_spec(line="10000/10000/0.1", machines=4), is_open=False)
    assert rack.recipe.mixes_weights and rack.assumed.reason.startswith("Decentralized Adam.")
    assert "times the tokens per second of synchronous data parallelism" in rack.assumed.reason
    assert problems(dataclasses.replace(rack, manifest="a" * 64)) == {}
    assert RunSpec.from_json(rack.to_json()) == rack


def test_run_that_anyone_may_join_exchanges_signed_updates():
    rack = resolve_strategy(build_spec(line="10000/10000/0.1", machines=4), is_open=True)
    assert rack.recipe.strategy == "streams" and "Anyone may join" in rack.assumed.reason


def test_auto_without_figures_and_chosen_strategies_are_safe():
    unknown = resolve_strategy(build_spec(machine="a computer of 2031"), is_open=False)
    assert unknown.recipe.strategy == "streams" and "nothing is known" in unknown.assumed.reason
    huge = resolve_strategy(build_spec("gpt3-175b", machine="8 GB laptop"), is_open=False)
    assert huge.recipe.strategy == "streams" and "nothing is known" in huge.assumed.reason
    chosen = spec_from_fields({"recipe.strategy": "decentralized-adam"})
    assert resolve_strategy(chosen, is_open=True) == chosen


def test_copy_of_a_run_has_the_strategy_auto_again():
    draft = build_spec(line="10000/10000/0.1", machines=4)
    assert restore_auto(resolve_strategy(draft, is_open=False)) == draft
    fixed = spec_from_fields({"recipe.strategy": "windows", "seed": 1})
    assert restore_auto(fixed) == fixed


@pytest.mark.parametrize(
    ("line", "part"),
    [("0/100/20", "above zero"), ("100/0", "above zero"), ("fast", "as in 15/112/23")],
)
def test_impossible_line_is_refused_with_a_sentence(line, part):
    with pytest.raises(SpecError) as raised:
        build_spec(line=line)
    assert part in raised.value.problems["assumed.line"]


def test_launched_spec_cannot_leave_the_strategy_open():
    spec = dataclasses.replace(build_spec(), manifest="a" * 64)
    assert "at launch" in problems(spec)["recipe.strategy"]


def test_spec_without_assumptions_has_the_text_that_it_had_before():
    spec = spec_from_fields({"seed": 1})
    assert "assumed" not in json.loads(spec.to_json())
    assert spec.assumed == Assumptions() and Assumptions().reason == ""


@pytest.mark.django_db
def test_launch_names_the_strategy_and_its_reason(person, launched_run):
    fields = {"recipe.strategy": "auto", "recipe.token_budget": 100_000, "seed": 7, **RACK}
    policy = JoinPolicy(access=Access.INVITATION)
    run, _ = launched_run(person(), spec=spec_from_fields(fields), join_policy=policy)
    assert run.draft_spec.recipe.strategy == AUTO
    spec = run.spec
    assert spec.recipe.strategy != AUTO and "4 machines" in spec.assumed.reason
    assert run.clone(run.owner).draft_spec.recipe.strategy == AUTO
