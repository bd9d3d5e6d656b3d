"""The forms of a run: its draft, its access and notes, and its budget."""

import dataclasses
from functools import lru_cache
from typing import Any, TypeVar
from uuid import UUID

from django import forms

from barnraise.errors import SpecError
from barnraise.spec import (
    MAX_PROMPTS,
    PRESETS,
    PROMPT_LENGTH,
    ModelSpec,
    RunSpec,
    preset,
)
from barnraise.spec import problems as spec_problems
from coordinator.accounts.models import User
from coordinator.lib.exceptions import UserError
from coordinator.runs.join_policy import JoinPolicy
from coordinator.runs.models import NewRun, Run
from coordinator.runs.spec_form import (
    FIXED_FIELDS,
    OFFERED,
    TOP_FIELDS,
    default_max_tokens,
    parse_budget,
    spec_from_fields,
)
from coordinator.web.run_form_fields import (
    ADVANCED,
    BASIC_FIELDS,
    CHOICES,
    NON_SPEC_FIELDS,
    PLACES_HELP,
    RUN_FIELDS,
    SOURCE_HELP,
    SOURCE_LABELS,
    TERMS_FIELDS,
    TOKENIZER_LABELS,
    StrategyField,
    as_sentence,
    choice_field,
    normalise_number,
    number_field,
    terms_fields,
    text_field,
)
from coordinator.web.start_fields import START_FIELDS, read_start, start_as_typed, start_fields

SHAPE = ("layers", "width", "heads", "context", "vocabulary")
DEFAULT_PRESET = "gpt-nano"
DEFAULT_BUDGET = "2000000"  # tokens
DEFAULT_VOLUNTEERS = 10
MAX_VOLUNTEERS = 10_000
MAX_GIGABYTES = 1e9


Number = TypeVar("Number", int, float)


@dataclasses.dataclass(frozen=True)
class PresetCard:
    """A preset as the form shows it."""

    name: str
    parameters: int
    shape: dict[str, int]
    chosen: bool


class ProblemForm(forms.Form):
    """A form that shows the problems of a run or spec at the fields they concern."""

    def add_problems(self, error: SpecError) -> None:
        """Show each problem at its field, or above the form if it has no field here."""
        for name, text in error.problems.items():
            if name not in self.fields:
                self.add_error(None, f"{name}: {text}")
            elif not self.has_error(name):
                self.add_error(name, as_sentence(text))

    def problems(self) -> list[tuple[str, str]]:
        """List (id of the field, sentence) for the summary above the form."""
        return [
            (self[name].auto_id, str(next(iter(self.errors[name]))))
            for name in self.fields
            if name in self.errors
        ]

    def parse_number(self, name: str, default: Number) -> Number:
        """Parse a number of the default's type, as people write it.

        Returns:
            The number; the default for an empty field, and, with an error at the field, for a text
            that is no such number.
        """
        text = normalise_number(self.cleaned_data.get(name) or "")
        if not text:
            return default
        try:
            return type(default)(text)
        except (ValueError, OverflowError):
            expected = "a whole number" if isinstance(default, int) else "a number"
            self.add_error(name, as_sentence(f"must be {expected}, not '{text[:40]}'"))
            return default

    def parse_memory(self, name: str) -> int:
        """Parse a memory size in GB and return it in bytes; 0 for an empty or invalid field."""
        gigabytes = self.parse_number(name, 0.0)
        if not -MAX_GIGABYTES < gigabytes < MAX_GIGABYTES:  # true of NaN too
            self.add_error(name, "This is not a memory size.")
            return 0
        return round(gigabytes * 1e9)

    def parse_terms(self) -> JoinPolicy:
        """Return the join policy as filled in; the policy checks itself."""
        values = self.cleaned_data
        return JoinPolicy(
            access=values.get("access") or "anyone",
            min_memory=self.parse_memory("min_memory"),
            min_device_memory=self.parse_memory("min_device_memory"),
            notes=values.get("notes") or "",
            team=UUID(values["team"]) if values.get("team") else None,
            visibility=values.get("visibility") or "public",
        )


class TermsForm(ProblemForm):
    """Who can join a run, and its notes."""

    def __init__(self, *args: Any, run: Run, **kwargs: Any) -> None:
        super().__init__(*args, initial=terms_as_typed(run.join_policy), **kwargs)
        self.run = run
        self.fields.update(terms_fields(run.owner, run))

    def clean(self) -> dict[str, Any]:
        """Convert the numbers and check them."""
        cleaned = super().clean()
        terms = self.parse_terms()
        cleaned["terms"] = terms
        self.add_problems(SpecError(terms.problems()))
        return cleaned

    def save(self, actor: User) -> None:
        """Store the join policy."""
        self.run.update_join_policy(self.cleaned_data["terms"], actor=actor)


class ExtendForm(ProblemForm):
    """More tokens for an active run."""

    tokens = number_field(
        "Additional tokens",
        "Such as 500M. Possible until the budget is spent; after that, copy the run.",
        "",
    )

    def __init__(self, *args: Any, run: Run, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.run = run

    def clean(self) -> dict[str, Any]:
        """Convert the numbers and check them."""
        cleaned = super().clean()
        budget = parse_budget(cleaned.get("tokens") or "")
        tokens = budget if isinstance(budget, int) else self.parse_number("tokens", 0)
        cleaned["tokens"] = tokens
        problem = self.run.extension_problem(tokens)
        if problem and not self.has_error("tokens"):
            self.add_error("tokens", problem)
        return cleaned

    def save(self, actor: User) -> bool:
        """Add the tokens; return False, with an error at the field, if the run has changed."""
        try:
            self.run.extend(self.cleaned_data["tokens"], actor=actor)
        except UserError as error:
            self.add_error("tokens", error.sentence)
            return False
        return True


class RunForm(ProblemForm):
    """The draft of a run. Numbers are text, so that 1e6 and 1,000,000 are accepted and kept."""

    name = forms.CharField(
        required=False,
        max_length=200,
        label="Name",
        help_text="Public; it becomes the run's address.",
    )
    preset = forms.ChoiceField(
        choices=[(name, name) for name in PRESETS], initial=DEFAULT_PRESET, label="Model"
    )

    def __init__(
        self, *args: Any, run: Run | None = None, owner: User | None = None, **kwargs: Any
    ) -> None:
        """Build the fields; `owner` is needed for a new run only."""
        self.run = run
        self._owner = owner
        if run:
            kwargs["initial"] = _run_as_typed(run)
        super().__init__(*args, **kwargs)
        self.fields["recipe.token_budget"] = number_field(
            "Token budget",
            "Training ends after this many tokens, all machines together. 500M, 0.5B and 20x "
            "(tokens for each parameter) work too.",
            DEFAULT_BUDGET,
        )
        self.fields.update(start_fields(owner, run))
        self.fields["text.source"] = choice_field("Text", SOURCE_LABELS, SOURCE_HELP)
        self.fields["text.places"] = text_field("Dataset or addresses", PLACES_HELP, 2, 9_000)
        self.fields["text.tokenizer"] = choice_field("Tokenizer", TOKENIZER_LABELS)
        self.fields["prompts"] = text_field(
            "Sample prompts",
            f"Up to {MAX_PROMPTS}, one per line. At each checkpoint a machine continues them, and "
            "the run's page shows the text.",
            3,
            2 * MAX_PROMPTS * PROMPT_LENGTH,
        )
        self.fields.update(terms_fields(owner, run))
        self.fields["volunteers"] = number_field("Expected volunteers", "", str(DEFAULT_VOLUNTEERS))
        for section in ADVANCED.values():
            for name, (label, note) in section.items():
                if run and name in RUN_FIELDS:
                    continue
                self.fields[name] = self._advanced_field(name, label, note)

    def _advanced_field(self, name: str, label: str, note: str) -> forms.Field:
        """Build a field of the advanced sections: a choice, or a number."""
        if name not in CHOICES:
            return number_field(label, note, _default_number(name))
        choices = CHOICES[name]
        value = self.initial.get(name)
        if value is not None and value not in dict(choices):
            choices = [*choices, (value, value)]
        field_class = StrategyField if name == "recipe.strategy" else forms.ChoiceField
        return field_class(required=False, choices=choices, label=label, help_text=note)

    def clean(self) -> dict[str, Any]:
        """Convert the numbers and check them."""
        cleaned = super().clean()
        spec_fields = self._unshown_fields()
        spec_fields |= {**OFFERED, "recipe.token_budget": DEFAULT_BUDGET}
        for name, value in cleaned.items():
            if name not in NON_SPEC_FIELDS and value:
                spec_fields[name] = value.strip() if isinstance(value, str) else value
        spec_fields["assumed.machines"] = self.volunteers()
        run_fields = {
            name: self.parse_number(name, default) for name, default in RUN_FIELDS.items()
        }
        terms = self.parse_terms()
        problems = terms.problems()
        if not 1 <= len(" ".join(cleaned.get("name", "").split())) <= 80:
            problems["name"] = "give the run a name of 1 to 80 characters"
        self.add_problems(SpecError(problems))
        try:
            chosen = read_start(cleaned, self._owner)
            preset_name = cleaned.get("preset") or DEFAULT_PRESET
            spec = spec_from_fields({**spec_fields, **chosen.spec_fields}, preset_name)
            cleaned["spec"] = dataclasses.replace(spec, start=chosen.start)
            cleaned["parent"] = chosen.parent
            self.add_problems(SpecError(spec_problems(cleaned["spec"])))
        except SpecError as error:
            self.add_problems(error)
        return {**cleaned, **run_fields, "terms": terms}

    def _unshown_fields(self) -> dict[str, Any]:
        """Return those settings of the draft that have no field here, so that they stay."""
        if self.run is None:
            return {}
        spec = self.run.draft_spec
        unshown = {
            name: value
            for name, value in _dotted_fields(spec).items()
            if name not in self.fields and name not in FIXED_FIELDS
        }
        if spec.max_tokens_per_update == default_max_tokens(spec.model, spec.recipe):
            del unshown["max_tokens_per_update"]  # it follows from fields that may change here
        return unshown

    def save(self, owner: User) -> Run | None:
        """Create or change the run; return None, with errors at the fields, if it refuses."""
        cleaned = self.cleaned_data
        try:
            if self.run is None:
                new = NewRun(
                    cleaned["name"],
                    cleaned["spec"],
                    join_policy=cleaned["terms"],
                    parent=cleaned["parent"],
                    **{name: cleaned[name] for name in RUN_FIELDS},
                )
                return Run.create(owner, new)
            if not self.run.edit(cleaned["name"], cleaned["spec"], actor=owner):
                self.add_error(
                    None, "The run was launched or changed in the meantime: reload its page."
                )
                return None
            self.run.update_join_policy(cleaned["terms"], actor=owner)
            return self.run
        except SpecError as error:
            self.add_problems(error)
            return None

    # ---- for the template ---------------------------------------------------------------------

    def preset_cards(self) -> list[PresetCard]:
        """List the presets with their sizes."""
        chosen = self["preset"].value()
        cards = []
        for name in PRESETS:
            model = preset(name)
            shape = {part: getattr(model, part) for part in SHAPE}
            cards.append(PresetCard(name, model.parameters, shape, name == chosen))
        return cards

    def basic_fields(self) -> list[forms.BoundField]:
        """List the fields of text and budget."""
        return [self[name] for name in BASIC_FIELDS]

    def start_fields(self) -> list[forms.BoundField]:
        """List the fields of the weights that the run begins with."""
        return [self[name] for name in START_FIELDS if name in self.fields]

    def terms_fields(self) -> list[forms.BoundField]:
        """List the fields of access and notes."""
        return [self[name] for name in TERMS_FIELDS if name in self.fields]

    def sections(self) -> list[tuple[str, list[forms.BoundField]]]:
        """List the advanced fields by section."""
        return [
            (title, [self[name] for name in names if name in self.fields])
            for title, names in ADVANCED.items()
        ]

    def has_advanced_values(self) -> bool:
        """Return whether an advanced field has a value or an error."""
        fields = [field for _, section in self.sections() for field in section]
        values = self.data if self.is_bound else self.initial
        defaults = {name: choices[0][0] for name, choices in CHOICES.items()}
        return any(
            field.errors or values.get(field.name) not in (None, "", defaults.get(field.name))
            for field in fields
        )

    def volunteers(self) -> int:
        """Return the number of volunteers for the estimate, whatever was typed."""
        text = normalise_number(self.data.get("volunteers") or "")
        if not (text.isascii() and text.isdigit()):
            return DEFAULT_VOLUNTEERS
        return max(1, min(int(text), MAX_VOLUNTEERS))


def terms_as_typed(terms: JoinPolicy) -> dict[str, str]:
    """Return a join policy as form values."""
    sizes = {name: getattr(terms, name) for name in ("min_memory", "min_device_memory")}
    return {
        "access": terms.access,
        "team": str(terms.team or ""),
        "visibility": terms.visibility,
        "notes": terms.notes,
        **{name: f"{size / 1e9:.10g}" if size else "" for name, size in sizes.items()},
    }


def _default_number(name: str) -> str:
    """Return the default of a numeric field as text; "" for the seed, which is random."""
    if name == "seed":
        return ""
    if name in RUN_FIELDS:
        return str(RUN_FIELDS[name])
    return str(_default_fields()[name])


@lru_cache(maxsize=1)
def _default_fields() -> dict[str, Any]:
    return _dotted_fields(RunSpec(model=preset(DEFAULT_PRESET)))


def _dotted_fields(spec: RunSpec) -> dict[str, Any]:
    """Flatten a spec into the form's field names, such as "model.layers"."""
    raw = dataclasses.asdict(spec)
    parts = {
        f"{part}.{name}": value
        for part in ("model", "text", "recipe", "assumed")
        for name, value in raw[part].items()
    }
    return {**parts, **{name: raw[name] for name in TOP_FIELDS}}


def _run_as_typed(run: Run) -> dict[str, Any]:
    """Return a draft as form values: only what differs from the preset and the defaults."""
    spec = run.draft_spec
    preset_name = _similar_preset(spec.model)
    vocabulary = 256 if spec.text.tokenizer == "bytes" else None
    defaults = _dotted_fields(RunSpec(model=preset(preset_name, vocabulary)))
    defaults["seed"] = None  # a draft's seed is always shown
    always_shown = {*BASIC_FIELDS, *CHOICES, "assumed.machines"}
    values = {
        name: str(value)
        for name, value in _dotted_fields(spec).items()
        if name in always_shown or value != defaults[name]
    }
    del values["assumed.machines"]
    values["volunteers"] = str(spec.assumed.machines)
    values["text.places"] = "\n".join(spec.text.places)
    values["prompts"] = "\n".join(spec.prompts)
    values |= start_as_typed(spec)
    return {**values, **terms_as_typed(run.join_policy), "name": run.name, "preset": preset_name}


def _similar_preset(model: ModelSpec) -> str:
    """Return the first preset with the model's layers, width and heads, or the default preset."""
    for name in PRESETS:
        shape = preset(name)
        if (shape.layers, shape.width, shape.heads) == (model.layers, model.width, model.heads):
            return name
    return DEFAULT_PRESET
