"""Build a run's spec from flat fields, as forms and command lines have them. Pure."""

import dataclasses
import re
import secrets
from collections.abc import Mapping
from typing import Any

from barnraise.errors import SpecError
from barnraise.spec import (
    AUTO,
    Assumptions,
    ModelSpec,
    Recipe,
    RunSpec,
    Start,
    TextSpec,
    preset,
    problems,
)

# An update may claim the tokens of so many rounds: enough for longer rounds, not for a whole budget
# at once.
UPDATE_ROUNDS = 16
OFFERED = {"recipe.codec": AUTO}  # what forms preselect; the spec's own default is older
# These fields of a spec's parts can be set; of its start only the model, for scripts.
PARTS = {"model": ModelSpec, "text": TextSpec, "recipe": Recipe, "assumed": Assumptions}
FIXED_FIELDS = {"assumed.reason"}  # the launch sets them
TOP_FIELDS = ("seed", "max_tokens_per_update", "verdict_horizon")
LINES = "lines"  # the type of a field with a text on each line
BUDGET = "recipe.token_budget"
# "500M" and "0.5B" are tokens, "20x" are tokens for each parameter of the model.
BUDGET_FORM = re.compile(r"([0-9]{0,15}\.?[0-9]{1,15})\s*([kmbt]|x)", re.I)
BUDGET_UNITS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
TYPE_LABELS = {int: "a whole number", float: "a number", str: "a text"}


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
        else:
            values["recipe"]["token_budget"] = round(budget.factor * model.parameters)
    recipe = Recipe(**values["recipe"])
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
    text = typed.strip().replace(",", "").replace("_", "") if isinstance(typed, str) else ""
    match = BUDGET_FORM.fullmatch(text)
    if match is None:
        return typed
    number, unit = float(match[1]), match[2].lower()
    return TokensPerParameter(number) if unit == "x" else round(number * BUDGET_UNITS[unit])


def _parse_fields(fields: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Parse dotted fields.

    Returns:
        The values by part ("model", "text", "recipe"; "" for the spec's own fields) and name, and a
        sentence for each field that is not valid.
    """
    values: dict[str, dict[str, Any]] = {part: {} for part in (*PARTS, "start", "")}
    field_problems: dict[str, str] = {}
    types = {
        f"{part}.{field.name}": (part, field.name, field.type)
        for part, cls in PARTS.items()
        for field in dataclasses.fields(cls)
        if f"{part}.{field.name}" not in FIXED_FIELDS
    }
    types |= {name: ("", name, int) for name in TOP_FIELDS}
    types |= {"start.model": ("start", "model", str), "prompts": ("", "prompts", LINES)}
    for name, value in fields.items():
        if name not in types:
            field_problems[str(name)[:100]] = "is not a field of a run"
        elif value not in (None, ""):
            part, key, type_ = types[name]
            try:
                values[part][key] = _parse_value(value, type_)
            except (ValueError, OverflowError, TypeError):
                label = TYPE_LABELS.get(type_, "a list of texts")
                if name == BUDGET:
                    label = "tokens, such as 500M, or tokens for each parameter, such as 20x"
                field_problems[name] = f"must be {label}, not '{str(value)[:40]}'"
    return values, field_problems


def _parse_value(value: Any, type_: Any) -> Any:
    """Return a field's value, or its text, in the field's type."""
    if type_ == LINES:
        lines = value.splitlines() if isinstance(value, str) else map(str, value)
        return tuple(line.strip() for line in lines if line.strip())
    return _split_texts(value) if type_ == tuple[str, ...] else _parse_number(value, type_)


def _split_texts(value: Any) -> tuple[str, ...]:
    """Split a text at white space; take a list as it is. A dataset may be spelled hf:owner/name."""
    items = value.split() if isinstance(value, str) else [str(item) for item in value]
    return tuple(item.removeprefix("hf:") for item in items)


def _parse_number(value: Any, type_: Any) -> Any:
    """Read a number as people write it: 1e6, 1_000_000 and 1,000,000 are the same whole number."""
    if type_ is str or not isinstance(value, str):
        return type_(value)
    text = value.strip().replace(",", "").replace("_", "")
    if type_ is float:
        return float(text)
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if number != int(number):
            raise
        return int(number)
