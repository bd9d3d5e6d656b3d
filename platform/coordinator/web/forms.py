"""The forms of a run: its draft, its access and notes, and its budget."""

import dataclasses
import json
from itertools import chain
from typing import Any, TypeVar
from uuid import UUID

from django import forms

from barnraise.errors import SpecError
from barnraise.formats import format_bytes
from barnraise.spec import (
    FAMILIES,
    PRESETS,
    ModelSpec,
    RunSpec,
    preset,
)
from barnraise.spec import problems as spec_problems
from coordinator.accounts.models import User
from coordinator.lib.exceptions import UserError
from coordinator.runs.drafts import NewRun
from coordinator.runs.join_policy import JoinPolicy
from coordinator.runs.models import Run
from coordinator.runs.spec_form import (
    BUDGET,
    FIELDS,
    OFFERED,
    default_max_tokens,
    fields_of_spec,
    normalise_number,
    parse_budget,
    spec_from_fields,
)
from coordinator.web.run_form_fields import (
    ADVANCED,
    BASIC_FIELDS,
    CHOICES,
    DEFAULT_BUDGET,
    DEFAULT_PRESET,
    RUN_FIELDS,
    as_sentence,
    number_field,
    run_field,
    spec_field,
    terms_fields,
)
from coordinator.web.start_fields import START_FIELDS, read_start, start_as_typed, start_fields

DEFAULT_VOLUNTEERS = 10
MAX_VOLUNTEERS = 10_000
MAX_GIGABYTES = 1e9


Number = TypeVar("Number", int, float)

STATE_BYTES, DISK_STATE_BYTES = 24, 28  # a parameter, of a machine that trains and exchanges
GPU_BYTES = 24 * 10**9  # of a large GPU at home


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
            (self[name].auto_id, f"{self[name].label}: {next(iter(self.errors[name]))}")
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


@dataclasses.dataclass(frozen=True)
class PresetFamily:
    """The presets of one family, for the template.

    Attributes:
        name: the family's.
        presets: the name of each, its model, what training it takes, and its fields as JSON.
        chosen: the chosen preset, of this family or of another.
    """

    name: str
    presets: list[tuple[str, ModelSpec, str, str]]
    chosen: str

    @property
    def is_open(self) -> bool:
        """Whether the chosen preset is one of them."""
        return self.chosen in [name for name, *_ in self.presets]

    @property
    def sizes(self) -> list[int]:
        """Return the numbers of parameters of the smallest and the largest model."""
        sizes = [model.parameters for _, model, *_ in self.presets]
        return [min(sizes), max(sizes)]


def _describe_preset(name: str) -> tuple[str, ModelSpec, str, str]:
    model = preset(name)
    return name, model, describe_need(model.parameters), json.dumps(dataclasses.asdict(model))


def describe_need(parameters: int) -> str:
    """Return the memory that holds the state of a model in training, and what does without. Pure.

    The weights, AdamW's moments and what the exchange keeps take 24 bytes a parameter; on disk, for
    machines with less memory, 28.
    """
    memory = f"{format_bytes(STATE_BYTES * parameters)} of memory"
    if STATE_BYTES * parameters <= GPU_BYTES:
        return memory
    disk = format_bytes(DISK_STATE_BYTES * parameters)
    return f"{memory}, more than one GPU has; or {disk} of disk"


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
        basic = {name: spec_field(name) for name in BASIC_FIELDS}
        # Problems are listed in this order: that of the budget before those of the start.
        self.fields.update({BUDGET: basic[BUDGET], **start_fields(owner, run), **basic})
        self.fields.update(terms_fields(owner, run))
        self.fields["volunteers"] = number_field("Expected volunteers", "", str(DEFAULT_VOLUNTEERS))
        for name in chain(*ADVANCED.values()):
            if name in FIELDS:
                self.fields[name] = spec_field(name, self.initial.get(name))
            elif run is None:
                self.fields[name] = run_field(name)

    def clean(self) -> dict[str, Any]:
        """Convert the numbers and check them."""
        cleaned = super().clean()
        spec_fields = {**self._unshown_fields(), **OFFERED, BUDGET: DEFAULT_BUDGET}
        for name, value in cleaned.items():
            if name in FIELDS and name not in START_FIELDS and value:
                spec_fields[name] = value.strip()
        spec_fields["assumed.machines"] = self.volunteers()
        run_fields = {
            name: self.parse_number(name, default) for name, (default, *_) in RUN_FIELDS.items()
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
            name: value for name, value in fields_of_spec(spec).items() if name not in self.fields
        }
        if self.cleaned_data.get("preset") != _similar_preset(spec.model):
            # The architecture and its settings follow the preset.
            unshown = {name: unshown[name] for name in unshown if not name.startswith("model.")}
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

    def families(self) -> list[PresetFamily]:
        """List the presets by family."""
        chosen = self["preset"].value()
        return [
            PresetFamily(family, [_describe_preset(name) for name in names], chosen)
            for family, names in FAMILIES.items()
        ]

    def basic_fields(self) -> list[forms.BoundField]:
        """List the fields of text and budget."""
        return [self[name] for name in BASIC_FIELDS]

    def start_fields(self) -> list[forms.BoundField]:
        """List the fields of the weights that the run begins with."""
        return [self[name] for name in START_FIELDS if name in self.fields]

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
        return max(1, min(int(text[:20]), MAX_VOLUNTEERS))


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


def _run_as_typed(run: Run) -> dict[str, Any]:
    """Return a draft as form values: only what differs from the preset and the defaults."""
    spec = run.draft_spec
    preset_name = _similar_preset(spec.model)
    vocabulary = 256 if spec.text.tokenizer == "bytes" else None
    defaults = fields_of_spec(RunSpec(model=preset(preset_name, vocabulary)))
    defaults["seed"] = None  # a draft's seed is always shown
    always_shown = {*BASIC_FIELDS, *CHOICES}.difference(ADVANCED["Model"])
    values = {
        name: str(value)
        for name, value in fields_of_spec(spec).items()
        if name in always_shown or value != defaults[name]
    }
    values["volunteers"] = str(spec.assumed.machines)
    values["text.places"] = "\n".join(spec.text.places)
    values["prompts"] = "\n".join(spec.prompts)
    values |= start_as_typed(spec)
    return {**values, **terms_as_typed(run.join_policy), "name": run.name, "preset": preset_name}


def _similar_preset(model: ModelSpec) -> str:
    """Return the preset of the same architecture that differs from a model in the fewest fields."""
    names = [each.name for each in dataclasses.fields(ModelSpec)]

    def difference(name: str) -> tuple[bool, int]:
        other = preset(name)
        differing = sum(getattr(other, each) != getattr(model, each) for each in names)
        return other.architecture != model.architecture, differing

    return min(PRESETS, key=difference)
