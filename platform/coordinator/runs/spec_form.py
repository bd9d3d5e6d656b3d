"""A run's spec from flat fields, as forms and command lines have them: preset or shape, text, recipe."""

import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any

from barnraise.errors import SpecError
from barnraise.spec import AUTO, ModelSpec, Recipe, RunSpec, TextSpec, preset, problems

ROUNDS = 16  # an update may claim the tokens of so many rounds: room for longer ones, none to spend a budget at once
OFFERED = {
    "recipe.codec": AUTO
}  # what people are offered where they say nothing; the spec's own default is older
FIXED = "streams"  # rounds end together by the clock, said a part at a time, as far as lines allow
PARTS = {"model": ModelSpec, "text": TextSpec, "recipe": Recipe}


def spec_from_fields(fields: Mapping[str, Any], preset_name: str = "gpt-nano") -> RunSpec:
    """`fields` maps dotted names ("model.layers", "recipe.learning_rate", "seed") to values or their text; a field that
    is absent, None or "" keeps its default. The strategy "auto" leaves rounds and what updates say to each machine and
    its line; a spec says that as the codec "auto". Raises SpecError with a sentence for each field that makes no sense.
    """
    found: dict[str, str] = {}
    if fields.get("recipe.strategy") == AUTO:
        if fields.get("recipe.codec") not in (None, "", AUTO):
            found["recipe.codec"] = (
                "the strategy auto leaves this to each machine: choose another strategy to fix it"
            )
        fields = {**fields, "recipe.strategy": FIXED, "recipe.codec": AUTO}
    values: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    top: dict[str, Any] = {}
    known = {
        f"{p}.{f.name}": (values[p], f.name, f.type)
        for p, kind in PARTS.items()
        for f in dataclasses.fields(kind)
    }
    known |= {
        name: (top, name, int) for name in ("seed", "max_tokens_per_update", "verdict_horizon")
    }
    for name, value in fields.items():
        if name not in known:
            found[str(name)[:100]] = "is not a field of a run"
        elif value not in (None, ""):
            target, key, kind = known[name]
            try:
                target[key] = _texts(value) if kind == tuple[str, ...] else _number(value, kind)
            except (ValueError, OverflowError, TypeError):
                what = {int: "a whole number", float: "a number", str: "a text"}.get(
                    kind, "a list of texts"
                )
                found[name] = f"must be {what}, not '{str(value)[:40]}'"
    try:
        model = dataclasses.replace(preset(preset_name), **values["model"])
    except SpecError as error:
        raise SpecError(found | error.problems) from None
    text = TextSpec(**values["text"])
    if text.tokenizer == "bytes" and "vocabulary" not in values["model"]:
        model = dataclasses.replace(model, vocabulary=256)
    recipe = Recipe(**values["recipe"])
    if "warmup_tokens" not in values["recipe"]:
        recipe = dataclasses.replace(
            recipe, warmup_tokens=min(recipe.warmup_tokens, max(0, recipe.token_budget // 20))
        )
    top.setdefault("seed", secrets.randbits(63))
    round_tokens = max(1, recipe.step_sequences * model.context * recipe.round_steps)
    top.setdefault(
        "max_tokens_per_update", min(ROUNDS * round_tokens, RunSpec.max_tokens_per_update)
    )
    spec = RunSpec(model=model, text=text, recipe=recipe, **top)
    found = {**problems(spec), **found}
    if found:
        raise SpecError(found)
    return spec


def _texts(value: Any) -> tuple[str, ...]:
    """What stands between spaces and line ends; or a list of it."""
    return tuple(value.split()) if isinstance(value, str) else tuple(str(each) for each in value)


def _number(value: Any, kind: type):
    """Numbers as people write them: 1e6 and 1_000_000 and 1,000,000 are all the same whole number."""
    if kind is str or not isinstance(value, str):
        return kind(value)
    text = value.strip().replace(",", "").replace("_", "")
    if kind is float:
        return float(text)
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if number != int(number):
            raise
        return int(number)
