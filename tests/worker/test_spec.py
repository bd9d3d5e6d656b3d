"""What a run may be: each nonsense value has its sentence, and JSON is read strictly."""

import json
from dataclasses import replace

import pytest

from barnraise.errors import SpecError
from barnraise.spec import ModelSpec, Recipe, RunSpec, TextSpec, preset, problems

SOUND = RunSpec(ModelSpec(2, 32, 2, 32, 256), TextSpec(tokenizer="bytes"))


@pytest.mark.parametrize(
    ("part", "changed", "field"),
    [
        ("model", {"layers": 0}, "model.layers"),
        ("model", {"layers": 10_000}, "model.layers"),
        ("model", {"width": 15}, "model.width"),
        ("model", {"heads": 0}, "model.heads"),
        ("model", {"heads": 5}, "model.heads"),
        ("model", {"context": 1 << 20}, "model.context"),
        ("model", {"vocabulary": 1 << 20}, "model.vocabulary"),
        ("model", {"vocabulary": 300}, "model.vocabulary"),  # bytes have 256
        ("text", {"tokenizer": "bpe"}, "model.vocabulary"),  # which needs more than 256
        ("text", {"source": "the web"}, "text.source"),
        ("text", {"tokenizer": "words"}, "text.tokenizer"),
        ("text", {"held_out": 0.9}, "text.held_out"),
        ("text", {"shard_tokens": 1}, "text.shard_tokens"),
        ("recipe", {"token_budget": -1}, "recipe.token_budget"),
        ("recipe", {"learning_rate": 0.0}, "recipe.learning_rate"),
        ("recipe", {"learning_rate": float("nan")}, "recipe.learning_rate"),
        ("recipe", {"clip": float("inf")}, "recipe.clip"),
        ("recipe", {"schedule": "sometimes"}, "recipe.schedule"),
        ("recipe", {"warmup_tokens": -1}, "recipe.warmup_tokens"),
        ("recipe", {"weight_decay": 2.0}, "recipe.weight_decay"),
        ("recipe", {"step_sequences": 0}, "recipe.step_sequences"),
        ("recipe", {"round_steps": 0}, "recipe.round_steps"),
        ("recipe", {"step_sequences": 65_536, "round_steps": 10_000}, "recipe.round_steps"),
        ("recipe", {"strategy": "sync"}, "recipe.strategy"),
        ("recipe", {"codec": "zip"}, "recipe.codec"),
        ("recipe", {"codec": "dense3"}, "recipe.codec"),
        ("recipe", {"codec": "top4096x2"}, "recipe.codec"),
        ("recipe", {"codec": "top064x2"}, "recipe.codec"),
        ("recipe", {"outer_rate": 0.0}, "recipe.outer_rate"),
        ("recipe", {"outer_momentum": 1.0}, "recipe.outer_momentum"),
        ("recipe", {"feedback_decay": 1.1}, "recipe.feedback_decay"),
        ("recipe", {"evaluate_every": 1}, "recipe.evaluate_every"),
        ("", {"seed": -1}, "seed"),
        ("", {"max_tokens_per_update": 0}, "max_tokens_per_update"),
        ("", {"verdict_horizon": 0}, "verdict_horizon"),
        ("", {"threshold": 2, "roots": ("a" * 64,)}, "threshold"),
        ("", {"format": 2}, "format"),
    ],
)
def test_each_nonsense_value_has_a_sentence_at_its_field(part, changed, field):
    assert problems(SOUND) == {}
    wrong = replace(getattr(SOUND, part), **changed) if part else None
    spec = replace(SOUND, **({part: wrong} if part else changed))
    assert field in problems(spec) and len(problems(spec)[field]) > 15
    with pytest.raises(SpecError) as caught:
        RunSpec.from_json(spec.to_json())
    assert field in caught.value.problems


def test_a_spec_comes_back_from_its_json_to_the_byte():
    spec = replace(SOUND, recipe=Recipe(learning_rate=1e-4), roots=("a" * 64,), seed=2**63 - 1)
    assert RunSpec.from_json(spec.to_json()) == spec
    assert RunSpec.from_json(spec.to_json()).to_json() == spec.to_json()


def with_(path: str, value) -> str:
    raw = json.loads(SOUND.to_json())
    *where, name = path.split(".")
    into = raw
    for step in where:
        into = into[step]
    into[name] = value
    return json.dumps(raw)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (with_("sed", 1), "sed"),
        (with_("model.depth", 1), "model.depth"),
        (with_("model.layers", "2"), "model.layers"),
        (with_("model.layers", True), "model.layers"),
        (with_("model.layers", 2.0), "model.layers"),
        (with_("model.layers", None), "model.layers"),
        (with_("model.layers", 10**400), "model.layers"),
        (with_("recipe.learning_rate", "1e-3"), "recipe.learning_rate"),
        (with_("recipe.learning_rate", 10**400), "recipe.learning_rate"),
        (with_("model", []), "model."),
        (with_("roots", "a"), "roots"),
        (with_("roots", [1]), "roots"),
        ("{}", "model"),
        ("[]", "spec"),
        ("null", "spec"),
        ("", "spec"),
        ("{", "spec"),
        ("[" * 100_000, "spec"),
        ('{"model":' * 100_000, "spec"),
        (f'{{"seed": {"9" * 10_000}}}', "spec"),
        (with_("seed", "x" * 1_000_000), "seed"),
    ],
    ids=range(21),
)
def test_json_that_is_no_spec_is_refused_at_the_field_and_in_few_words(text, field):
    with pytest.raises(SpecError) as caught:
        RunSpec.from_json(text)
    assert field in caught.value.problems
    assert len(str(caught.value)) < 2000


def test_an_unknown_preset_is_refused_with_those_there_are():
    with pytest.raises(SpecError, match="there is no preset 'gpt-giant'; the presets are gpt-nano"):
        preset("gpt-giant")
