"""Build a run's spec from flat fields, as forms and command lines have them. Pure."""

import dataclasses
import re
import secrets
from collections import defaultdict
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from barnraise.errors import SpecError
from barnraise.spec import (
    AUTO,
    MUON,
    Assumptions,
    ModelSpec,
    Recipe,
    RunSpec,
    Start,
    TextSpec,
    model_problems,
    preset,
    problems,
)

# An update may claim the tokens of so many rounds: enough for longer rounds, not for a whole budget
# at once.
UPDATE_ROUNDS = 16
# Rates that are offered with Muon where none is named: of what AdamW trains, and of the matrices.
# `make study-speedup` has compared them with others.
MUON_RATES = {"learning_rate": 4e-3, "matrix_rate": 5e-3}
OFFERED = {"recipe.codec": AUTO}  # what forms preselect; the spec's own default is older
BUDGET, PROMPTS = "recipe.token_budget", "prompts"
PARTS = {
    "model": ModelSpec,
    "text": TextSpec,
    "recipe": Recipe,
    "assumed": Assumptions,
    "start": Start,
}
TOP_FIELDS = ("seed", "max_tokens_per_update", "verdict_horizon", PROMPTS)
# Dotted name → field, of those that can be set: the launch gives the reason for the strategy, and
# weights to start from are a checkpoint's.
FIELDS: dict[str, dataclasses.Field[Any]] = {
    f"{part}.{each.name}": each
    for part, cls in PARTS.items()
    for each in dataclasses.fields(cls)
    if each.name != "reason" and (part != "start" or each.name == "model")
} | {each.name: each for each in dataclasses.fields(RunSpec) if each.name in TOP_FIELDS}
# "500M" and "0.5B" are tokens, "20x" are tokens for each parameter of the model.
BUDGET_FORM = re.compile(r"([0-9]{0,15}\.?[0-9]{1,15})\s*([kmbt]|x)", re.I)
FLAGS = {"true": True, "false": False}
BUDGET_UNITS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
TYPE_LABELS = {
    int: "a whole number",
    float: "a number",
    float | None: "a number",
    str: "a text",
    bool: "true or false",
}


def spec_from_fields(fields: Mapping[str, Any], preset_name: str = "gpt-nano") -> RunSpec:
    """Build a spec.

    The launch replaces the strategy "auto" (`strategy_choice.py`). It leaves round length and
    compression to each machine and its line.

    Args:
        fields: dotted names ("model.layers", "recipe.learning_rate", "seed") → values, or their
            text. A field that is absent, None or "" keeps its default.
        preset_name: the preset whose model shape the fields change.

    Raises:
        SpecError: with a sentence for each field that is not valid.
    """
    field_problems: dict[str, str] = {}
    if fields.get("recipe.strategy") == AUTO:
        if fields.get("recipe.codec") not in (None, "", AUTO):
            field_problems["recipe.codec"] = (
                "the strategy auto leaves this to each machine: choose another strategy to fix it"
            )
        fields = {**fields, "recipe.codec": AUTO}
    budget = parse_budget(fields.get(BUDGET))
    values, parse_problems = _parse_fields(
        {**fields, BUDGET: None if isinstance(budget, TokensPerParameter) else budget}
    )
    field_problems |= parse_problems
    try:
        model = dataclasses.replace(preset(preset_name), **values["model"])
    except SpecError as error:
        raise SpecError(field_problems | error.problems) from None
    text = TextSpec(**values["text"])
    if text.tokenizer == "bytes" and "vocabulary" not in values["model"]:
        model = dataclasses.replace(model, vocabulary=256)
    if isinstance(budget, TokensPerParameter):
        if fields.get("start.model"):
            field_problems[BUDGET] = (
                "must be in tokens, such as 500M: the size of a Hugging Face model is known once "
                "one of your machines has read it"
            )
        elif not model_problems(model):
            values["recipe"]["token_budget"] = round(budget.factor * model.parameters)
    recipe = Recipe(**values["recipe"])
    if recipe.optimizer == MUON and "learning_rate" not in values["recipe"]:
        recipe = dataclasses.replace(recipe, **{**MUON_RATES, **values["recipe"]})
    if "warmup_tokens" not in values["recipe"]:
        warmup_tokens = min(recipe.warmup_tokens, max(0, recipe.token_budget // 20))
        recipe = dataclasses.replace(recipe, warmup_tokens=warmup_tokens)
    top: dict[str, Any] = {
        "seed": secrets.randbits(63),
        "max_tokens_per_update": default_max_tokens(model, recipe),
    } | values[""]
    start = Start(**values["start"])
    assumed = Assumptions(**values["assumed"])
    spec = RunSpec(model=model, text=text, recipe=recipe, start=start, assumed=assumed, **top)
    field_problems = {**problems(spec), **field_problems}
    if field_problems:
        raise SpecError(field_problems)
    return spec


def fields_of_spec(spec: RunSpec) -> dict[str, Any]:
    """Return the values of all fields that can be set: dotted name → value."""
    return {name: attrgetter(name)(spec) for name in FIELDS}


def default_max_tokens(model: ModelSpec, recipe: Recipe) -> int:
    """Return the most tokens that an update may state, where the owner sets no other limit."""
    round_tokens = max(1, recipe.step_sequences * model.context * recipe.round_steps)
    return min(UPDATE_ROUNDS * round_tokens, RunSpec.max_tokens_per_update)


@dataclasses.dataclass(frozen=True)
class TokensPerParameter:
    """A budget that follows from the size of the model, such as 20x."""

    factor: float


def parse_budget(typed: Any) -> Any:
    """Read a budget as people write it.

    Args:
        typed: 500M, 0.5B or 1.5 T for tokens, 20x for tokens for each parameter of the model.

    Returns:
        A whole number of tokens, a `TokensPerParameter`, or what was typed, if it is neither.
    """
    text = normalise_number(typed) if isinstance(typed, str) else ""
    match = BUDGET_FORM.fullmatch(text)
    if match is None:
        return typed
    number, unit = float(match[1]), match[2].lower()
    return TokensPerParameter(number) if unit == "x" else round(number * BUDGET_UNITS[unit])


def normalise_number(text: str) -> str:
    """Remove spaces, commas and underscores."""
    return text.strip().replace(",", "").replace("_", "")


def _parse_fields(fields: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Parse dotted fields.

    Returns:
        The values by part ("model", "text", "recipe"; "" for the spec's own fields) and name, and a
        sentence for each field that is not valid.
    """
    values: dict[str, dict[str, Any]] = defaultdict(dict)
    field_problems: dict[str, str] = {}
    for name, value in fields.items():
        if name not in FIELDS:
            field_problems[str(name)[:100]] = "is not a field of a run"
        elif value not in (None, ""):
            part, _, key = name.rpartition(".")
            try:
                values[part][key] = _parse_value(name, value)
            except (KeyError, ValueError, OverflowError, TypeError):
                label = TYPE_LABELS.get(FIELDS[name].type, "a list of texts")
                if name == BUDGET:
                    label = "tokens, such as 500M, or tokens for each parameter, such as 20x"
                field_problems[name] = f"must be {label}, not '{str(value)[:40]}'"
    return values, field_problems


def _parse_value(name: str, value: Any) -> Any:
    """Return a field's value, or its text, in the field's type."""
    if name == PROMPTS:
        lines = value.splitlines() if isinstance(value, str) else map(str, value)
        return tuple(line.strip() for line in lines if line.strip())
    type_ = FIELDS[name].type
    return _split_texts(value) if type_ == tuple[str, ...] else _parse_number(value, type_)


def _split_texts(value: Any) -> tuple[str, ...]:
    """Split a text at white space; take a list as it is. A dataset may be spelled hf:owner/name."""
    items = value.split() if isinstance(value, str) else [str(item) for item in value]
    return tuple(item.removeprefix("hf:") for item in items)


def _parse_number(value: Any, type_: Any) -> Any:
    """Read a number as people write it: 1e6, 1_000_000 and 1,000,000 are the same whole number."""
    if type_ is bool:
        return FLAGS[str(value).lower()]
    if type_ == float | None:  # a value is given
        type_ = float
    if type_ is str or not isinstance(value, str):
        return type_(value)
    text = normalise_number(value)
    if type_ is float:
        return float(text)
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if number != int(number):
            raise
        return int(number)
