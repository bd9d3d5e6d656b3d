"""Tests of the run's specification: invalid values give a sentence, and JSON is read strictly."""

import json
import math
import re
from dataclasses import asdict, fields, replace
from typing import get_args

import pytest

from barnraise.errors import SpecError
from barnraise.planning.mixing_topology import TOPOLOGIES
from barnraise.protocol.coordinator_messages import ArchitectureName, ModelShape
from barnraise.protocol.signing import digest
from barnraise.spec import (
    DECENTRALIZED_ADAM,
    MIXING_TOPOLOGIES,
    MUON,
    Assumptions,
    ModelSpec,
    Recipe,
    RunSpec,
    Start,
    TextSpec,
    preset,
    problems,
)
from barnraise.spec.architectures import ARCHITECTURES

GROUPS = "model.key_value_heads"
VALID = RunSpec(ModelSpec(2, 32, 2, 32, 256), TextSpec(tokenizer="bytes"))


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
        ("model", {"vocabulary": 300}, "model.vocabulary"),  # a byte tokenizer has 256
        ("model", {"architecture": "mamba"}, "model.architecture"),
        ("model", {"key_value_heads": 1}, "model.key_value_heads"),  # GPT-2 has none
        ("model", {"qk_norm": True}, "model.qk_norm"),
        ("model", {"architecture": "llama", "heads": 4, "key_value_heads": 3}, GROUPS),
        ("model", {"architecture": "llama", "width": 30}, "model.heads"),  # a head of 15 elements
        ("model", {"architecture": "llama", "head_size": 15}, "model.head_size"),
        ("model", {"architecture": "llama", "hidden": -1}, "model.hidden"),
        ("model", {"architecture": "llama", "rope_theta": float("nan")}, "model.rope_theta"),
        ("text", {"tokenizer": "bpe"}, "model.vocabulary"),  # BPE needs more than 256
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
def test_invalid_value_gives_a_sentence_at_its_field(part, changed, field):
    assert problems(VALID) == {}
    if part:
        changed = {part: replace(getattr(VALID, part), **changed)}
    spec = replace(VALID, **changed)
    assert field in problems(spec) and len(problems(spec)[field]) > 15
    with pytest.raises(SpecError) as caught:
        RunSpec.from_json(spec.to_json())
    assert field in caught.value.problems


def test_spec_read_from_its_json_is_equal_to_the_byte():
    spec = replace(VALID, recipe=Recipe(learning_rate=1e-4), roots=("a" * 64,), seed=2**63 - 1)
    assert RunSpec.from_json(spec.to_json()) == spec
    assert RunSpec.from_json(spec.to_json()).to_json() == spec.to_json()


def test_spec_of_a_llama_states_only_what_differs_and_reads_back():
    spec = RunSpec(preset("qwen3-8b"))
    raw = json.loads(spec.to_json())["model"]
    assert raw["architecture"] == "llama" and raw["tied_head"] is False
    assert "hidden" in raw and "hidden" not in json.loads(VALID.to_json())["model"]
    assert RunSpec.from_json(spec.to_json()) == spec
    with pytest.raises(SpecError, match="must be true or false"):
        RunSpec.from_json(spec.to_json().replace('"tied_head":false', '"tied_head":0'))


def test_manifest_holds_every_field_of_a_model():
    assert set(ModelShape.model_fields) == {field.name for field in fields(ModelSpec)}
    assert get_args(ArchitectureName) == tuple(ARCHITECTURES)
    for model in (preset("gpt-nano"), preset("qwen3-8b")):
        assert ModelSpec(**ModelShape(**asdict(model)).model_dump()) == model
    older = dict(layers=2, width=32, heads=2, context=32, vocabulary=256)
    assert ModelSpec(**ModelShape(**older).model_dump()) == ModelSpec(**older)


def test_canonical_text_of_a_spec_keeps_its_digest():
    """The digest names the rules of runs that exist: nothing may change the text of a spec."""
    default = RunSpec(preset("gpt-nano"), seed=7)
    assert digest(default.to_json()) == (
        "4a50b7fb13f659ac1a777d5e7830288096aea9de5c2e731ff46c7646701ed809"
    )
    unusual = RunSpec(
        preset("gpt2-124m"),
        TextSpec(source="huggingface", places=("owner/name",)),
        Recipe(
            strategy=DECENTRALIZED_ADAM,
            codec="auto",
            mixing_bits=8,
            mixing_interval=2,
            learning_rate=3e-4,
        ),
        seed=9,
        start=Start(model="owner/tiny@v1"),
        prompts=("Once upon",),
        assumed=Assumptions(machines=3, line="100"),
    )
    assert digest(unusual.to_json()) == (
        "0ba30980d8f926c5a8a9455378baaffbe3a5304f9681b9e6b24b03e13b722de4"
    )


def json_with(path: str, value) -> str:
    """Return a valid spec as JSON, with another value at a dotted path."""
    fields = json.loads(VALID.to_json())
    *parents, name = path.split(".")
    target = fields
    for parent in parents:
        target = target[parent]
    target[name] = value
    return json.dumps(fields)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (json_with("sed", 1), "sed"),
        (json_with("model.depth", 1), "model.depth"),
        (json_with("model.layers", "2"), "model.layers"),
        (json_with("model.layers", True), "model.layers"),
        (json_with("model.layers", 2.0), "model.layers"),
        (json_with("model.layers", None), "model.layers"),
        (json_with("model.layers", 10**400), "model.layers"),
        (json_with("recipe.learning_rate", "1e-3"), "recipe.learning_rate"),
        (json_with("recipe.learning_rate", 10**400), "recipe.learning_rate"),
        (json_with("model", []), "model."),
        (json_with("roots", "a"), "roots"),
        (json_with("roots", [1]), "roots"),
        ("{}", "model"),
        ("[]", "spec"),
        ("null", "spec"),
        ("", "spec"),
        ("{", "spec"),
        ("[" * 100_000, "spec"),
        ('{"model":' * 100_000, "spec"),
        (f'{{"seed": {"9" * 10_000}}}', "spec"),
        (json_with("seed", "x" * 1_000_000), "seed"),
    ],
    ids=range(21),
)
def test_invalid_json_is_refused_briefly_at_its_field(text, field):
    with pytest.raises(SpecError) as caught:
        RunSpec.from_json(text)
    assert field in caught.value.problems
    assert len(str(caught.value)) < 2000


def test_unknown_preset_is_refused_with_the_existing_ones():
    with pytest.raises(SpecError, match="there is no preset 'gpt-giant'; the presets are gpt-nano"):
        preset("gpt-giant")


def test_spec_of_updates_has_the_text_that_it_had_before_mixing():
    text = replace(VALID, recipe=Recipe()).to_json()
    assert '"strategy":"streams"' in text and "mixing" not in text
    mixing = replace(VALID, recipe=Recipe(strategy=DECENTRALIZED_ADAM, mixing_bits=8))
    assert RunSpec.from_json(mixing.to_json()) == mixing and "mixing_bits" in mixing.to_json()
    accumulating = replace(VALID, recipe=replace(mixing.recipe, mixing_accumulation=4))
    assert RunSpec.from_json(accumulating.to_json()) == accumulating


def test_strategies_that_no_run_can_have_are_refused_with_a_way_out():
    for changed, field, part in (
        ({"strategy": "gossip"}, "recipe.strategy", "updates, decentralized-adam"),
        ({"mixing_accumulation": 0}, "recipe.mixing_accumulation", "between 1 and"),
        ({"mixing_bits": 12}, "recipe.mixing_bits", "32, 16 or 8 bits"),
        ({"mixing_topology": "star"}, "recipe.mixing_topology", "ring, exponential"),
        ({"mixing_interval": 0}, "recipe.mixing_interval", "between 1 and"),
    ):
        recipe = replace(Recipe(strategy=DECENTRALIZED_ADAM), **changed)
        assert part in problems(replace(VALID, recipe=recipe))[field]


def test_spec_of_adamw_has_the_text_that_it_had_before_muon():
    assert "optimizer" not in VALID.to_json() and "matrix_rate" not in VALID.to_json()
    muon = replace(VALID, recipe=Recipe(optimizer=MUON, learning_rate=0.004))
    assert RunSpec.from_json(muon.to_json()) == muon and "matrix_rate" not in muon.to_json()
    assert muon.recipe.peak_matrix_rate == pytest.approx(0.01)
    rated = replace(VALID, recipe=Recipe(optimizer=MUON, matrix_rate=0.02))
    assert RunSpec.from_json(rated.to_json()) == rated and rated.recipe.peak_matrix_rate == 0.02


@pytest.mark.parametrize(
    ("recipe", "field", "part"),
    [
        (Recipe(optimizer="lion"), "recipe.optimizer", "must be one of adamw, muon; 'lion' is not"),
        (Recipe(matrix_rate=0.01), "recipe.matrix_rate", "leave it empty, or choose.*muon"),
        (Recipe(optimizer=MUON, matrix_rate=0.0), "recipe.matrix_rate", "above 0 and at most 1"),
        (Recipe(optimizer=MUON, matrix_rate=1.5), "recipe.matrix_rate", "this is 1.5"),
        (Recipe(optimizer=MUON, matrix_rate=math.nan), "recipe.matrix_rate", "above 0"),
        (Recipe(optimizer=MUON, learning_rate=0.5), "recipe.matrix_rate", "this is 1.25"),
        (
            Recipe(optimizer=MUON, strategy=DECENTRALIZED_ADAM),
            "recipe.optimizer",
            "choose the strategy updates for Muon, or the optimizer adamw",
        ),
    ],
    ids=str,
)
def test_optimizer_that_cannot_train_is_refused_with_what_to_change(recipe, field, part):
    found = problems(replace(VALID, recipe=recipe))
    assert set(found) == {field} and re.search(part, found[field])


def test_removed_strategy_is_refused_in_one_sentence_with_what_to_use():
    text = replace(VALID, recipe=Recipe(strategy="all-reduce")).to_json()
    with pytest.raises(SpecError) as refused:
        RunSpec.from_json(text)
    assert refused.value.problems == {
        "recipe.strategy": (
            "the strategy all-reduce was removed: use updates, or decentralized-adam for machines "
            "in one network; one owner's machines can train as one with torchrun and --engine "
            "sharded"
        )
    }


def test_stored_spec_of_a_removed_strategy_can_be_read_but_not_be_wrong():
    stored = replace(VALID, recipe=Recipe(strategy="all-reduce"))
    assert RunSpec.from_json(stored.to_json(), is_stored=True) == stored
    with pytest.raises(SpecError):
        RunSpec.from_json(replace(stored, seed=-1).to_json(), is_stored=True)
    with pytest.raises(SpecError):
        RunSpec.from_json(replace(VALID, recipe=Recipe(strategy="x")).to_json(), is_stored=True)


def test_topologies_of_specs_are_those_that_machines_have():
    assert set(MIXING_TOPOLOGIES) == set(TOPOLOGIES)
