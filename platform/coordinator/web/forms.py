"""The forms of a run: its draft, its access and notes, and its budget."""

import dataclasses
from typing import Any
from uuid import UUID

from django import forms

from barnraise.errors import SpecError
from barnraise.spec import AUTO, PRESETS, RunSpec, preset
from coordinator.accounts.models import User
from coordinator.lib.exceptions import UserError
from coordinator.runs.join_policy import JoinPolicy
from coordinator.runs.models import NewRun, Run
from coordinator.runs.spec_form import OFFERED, spec_from_fields
from coordinator.web import run_form_fields as words
from coordinator.web.run_form_fields import (
    ADVANCED,
    BASIC_FIELDS,
    CHOICES,
    NON_SPEC_FIELDS,
    RUN_FIELDS,
    TERMS_FIELDS,
    as_sentence,
    normalise_number,
    number_field,
)

SHAPE = ("layers", "width", "heads", "context", "vocabulary")
START = "gpt-nano"
BUDGET = "2000000"
VOLUNTEERS = 10


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
            if name in self.fields:
                if name not in self._errors:
                    self.add_error(name, as_sentence(text))
            else:
                self.add_error(None, f"{name}: {text}")

    def problems(self) -> list[tuple[str, str]]:
        """List (id of the field, sentence) for the summary above the form."""
        return [
            (self[name].auto_id, next(iter(self.errors[name])))
            for name in self.fields
            if name in self.errors
        ]

    def parse_number(self, name: str, kind: type, default: float) -> float:
        """Return a typed number; return the default, with an error at the field, if it is none."""
        text = normalise_number(self.cleaned_data.get(name) or "")
        try:
            return kind(text) if text else default
        except (ValueError, OverflowError):
            what = "a whole number" if kind is int else "a number"
            self.add_error(name, as_sentence(f"must be {what}, not '{text[:40]}'"))
            return default

    def parse_terms(self) -> JoinPolicy:
        """Return the join policy with gigabytes converted to bytes; it checks the ranges."""
        sizes = {}
        for name in ("least_memory", "least_device_memory"):
            gigabytes = self.parse_number(name, float, 0.0)
            if not -1e9 < gigabytes < 1e9:  # NaN neither
                self.add_error(name, "This is not a memory size.")
                gigabytes = 0.0
            sizes[name] = round(gigabytes * 1e9)
        said = self.cleaned_data
        team = UUID(said["team"]) if said.get("team") else None
        return JoinPolicy(
            access=said.get("access") or "anyone", notes=said.get("notes") or "", team=team, **sizes
        )


class TermsForm(ProblemForm):
    """Who can join a run, and its notes."""

    def __init__(self, *args: Any, run: Run, **kwargs: Any) -> None:
        super().__init__(*args, initial=terms_as_typed(run.join_policy), **kwargs)
        self.run = run
        self.fields.update(words.terms_fields(run.owner))

    def clean(self) -> dict[str, Any]:
        """Convert the numbers and check them."""
        cleaned = super().clean()
        cleaned["terms"] = terms = self.parse_terms()
        if found := terms.problems():
            self.add_problems(SpecError(found))
        return cleaned

    def save(self, actor: User) -> None:
        """Store the join policy."""
        self.run.update_join_policy(self.cleaned_data["terms"], actor=actor)


class ExtendForm(ProblemForm):
    """More tokens for an active run."""

    tokens = number_field(
        "Additional tokens",
        "Possible until the budget is spent; after that, copy the run.",
        "",
    )

    def __init__(self, *args: Any, run: Run, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.run = run

    def clean(self) -> dict[str, Any]:
        """Convert the numbers and check them."""
        cleaned = super().clean()
        cleaned["tokens"] = tokens = int(self.parse_number("tokens", int, 0))
        if "tokens" not in self.errors and (problem := self.run.extension_problem(tokens)):
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
        choices=[(name, name) for name in PRESETS], initial=START, label="Model"
    )

    def __init__(
        self, *args: Any, run: Run | None = None, owner: User | None = None, **kwargs: Any
    ) -> None:
        """Build the fields; `owner` is needed for a new run only."""
        self.run = run
        if run:
            kwargs["initial"] = _run_as_typed(run)
        super().__init__(*args, **kwargs)
        defaults = _flat(RunSpec(model=preset(START)))
        self.fields["recipe.token_budget"] = number_field(
            "Token budget",
            "Training ends after this many tokens, all machines together.",
            BUDGET,
        )
        self.fields["text.source"] = words.choice_field("Text", words.SOURCE_LABELS)
        self.fields["text.places"] = words.text_field(
            "Dataset or addresses",
            "A dataset as owner/name (with /folder, @revision, #column), or one address of "
            "a .txt, .jsonl or .parquet file per line; "
            "for your own files run barnraise prepare.",
            2,
            9_000,
        )
        self.fields["text.tokenizer"] = words.choice_field("Tokenizer", words.TOKENIZER_LABELS)
        self.fields.update(words.terms_fields(run.owner if run else owner))
        self.fields["volunteers"] = number_field("Expected volunteers", "", str(VOLUNTEERS))
        for section in ADVANCED.values():
            for name, (label, note) in section.items():
                if run and name in RUN_FIELDS:
                    continue
                if known := CHOICES.get(name):
                    now = self.initial.get(name)
                    known = known if now in (None, *dict(known)) else [*known, (now, now)]
                    self.fields[name] = forms.ChoiceField(
                        required=False, choices=known, label=label, help_text=note
                    )
                    continue
                hint = "" if name == "seed" else str(RUN_FIELDS.get(name, defaults.get(name, "")))
                self.fields[name] = number_field(label, note, hint)

    def clean(self) -> dict[str, Any]:
        """Convert the numbers and check them."""
        cleaned = super().clean()
        typed = {
            name: value.strip() if isinstance(value, str) else value
            for name, value in cleaned.items()
            if name not in NON_SPEC_FIELDS and value
        }
        typed = {**OFFERED, "recipe.token_budget": BUDGET, **typed}
        own = {
            name: self.parse_number(name, type(default), default)
            for name, default in RUN_FIELDS.items()
        }
        cleaned["terms"] = terms = self.parse_terms()
        found = terms.problems()
        if not 1 <= len(" ".join(cleaned.get("name", "").split())) <= 80:
            found["name"] = "give the run a name of 1 to 80 characters"
        self.add_problems(SpecError(found))
        try:
            cleaned["spec"] = spec_from_fields(typed, cleaned.get("preset") or START)
        except SpecError as error:
            self.add_problems(error)
        cleaned.update(own)
        return cleaned

    def save(self, owner: User) -> Run | None:
        """Create or change the run; return None, with errors at the fields, if it refuses."""
        cleaned = self.cleaned_data
        try:
            if self.run is None:
                new = NewRun(
                    cleaned["name"],
                    cleaned["spec"],
                    join_policy=cleaned["terms"],
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
        models = {name: preset(name) for name in PRESETS}
        return [
            PresetCard(
                name,
                model.parameters,
                {part: getattr(model, part) for part in SHAPE},
                name == chosen,
            )
            for name, model in models.items()
        ]

    def basic_fields(self) -> list[forms.BoundField]:
        """List the fields of text and budget."""
        return [self[name] for name in BASIC_FIELDS]

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
        folded = [field for _, fields in self.sections() for field in fields]
        typed = self.data if self.is_bound else self.initial
        usual = {name: known[0][0] for name, known in CHOICES.items()}
        return any(
            field.errors or typed.get(field.name) not in (None, "", usual.get(field.name))
            for field in folded
        )

    def volunteers(self) -> int:
        """Return the number of volunteers for the estimate, whatever was typed."""
        text = normalise_number(self.data.get("volunteers") or "")
        return max(1, min(int(text), 10_000)) if text.isascii() and text.isdigit() else VOLUNTEERS


def terms_as_typed(terms: JoinPolicy) -> dict[str, str]:
    """Terms as somebody would have typed them."""
    sizes = {name: getattr(terms, name) for name in ("least_memory", "least_device_memory")}
    return {
        "access": terms.access,
        "team": str(terms.team or ""),
        "notes": terms.notes,
        **{name: f"{size / 1e9:.10g}" if size else "" for name, size in sizes.items()},
    }


def _flat(spec: RunSpec) -> dict[str, Any]:
    raw = dataclasses.asdict(spec)
    parts = {
        f"{part}.{name}": value
        for part in ("model", "text", "recipe")
        for name, value in raw[part].items()
    }
    return {**parts, "seed": raw["seed"]}


def _run_as_typed(run: Run) -> dict[str, Any]:
    """Return a draft as form values: only what differs from the preset and the defaults."""
    spec = run.spec
    shape = dataclasses.asdict(spec.model)
    near = [
        name
        for name in PRESETS
        if all(shape[p] == getattr(preset(name), p) for p in ("layers", "width", "heads"))
    ]
    chosen = near[0] if near else START
    defaults = {
        **_flat(RunSpec(model=preset(chosen, 256 if spec.text.tokenizer == "bytes" else None))),
        "seed": None,
    }
    always = {*BASIC_FIELDS, *CHOICES}
    changed = {n: str(v) for n, v in _flat(spec).items() if n in always or v != defaults[n]}
    if spec.recipe.codec == AUTO:
        changed["recipe.strategy"] = AUTO
    changed["text.places"] = "\n".join(spec.text.places)
    return {**changed, **terms_as_typed(run.join_policy), "name": run.name, "preset": chosen}
