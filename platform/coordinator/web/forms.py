"""The form of a run: a name, a preset, a text and a budget; everything else is folded away and has a default."""

import dataclasses
from typing import Any

from django import forms

from barnraise.errors import SpecError
from barnraise.spec import PRESETS, SCHEDULES, SOURCES, TOKENIZERS, RunSpec, preset
from coordinator.runs.drafts import spec_from_fields
from coordinator.runs.models import Run

SHAPE = ("layers", "width", "heads", "context", "vocabulary")
SOURCE_WORDS = {"stdlib": "Python's standard library (about 12 MB of source code)"}
TOKENIZER_WORDS = {"bpe": "Byte-pair encoding, learnt from the text", "bytes": "Bytes (256 tokens)"}
START = "gpt-nano"

# dotted field → (label, help). Those without a default elsewhere show the spec's own as placeholder.
ADVANCED: dict[str, dict[str, tuple[str, str]]] = {
    "Shape of the model": {
        "model.layers": ("Layers", ""),
        "model.width": ("Width", "divisible by the heads"),
        "model.heads": ("Heads", ""),
        "model.context": ("Context", "tokens the model looks back"),
        "model.vocabulary": ("Vocabulary", "tokens it knows"),
    },
    "How it learns": {
        "recipe.learning_rate": ("Learning rate", "at its highest"),
        "recipe.schedule": ("Schedule", "of the learning rate"),
        "recipe.warmup_tokens": ("Warm-up", "tokens until the learning rate is full"),
        "recipe.weight_decay": ("Weight decay", ""),
        "recipe.clip": ("Clip", "norm of the gradient"),
        "recipe.step_sequences": ("Sequences a step", "on each machine"),
        "recipe.evaluate_every": ("Validate every", "tokens of the whole run"),
    },
    "How machines agree": {
        "recipe.round_steps": ("Steps a round", "between two updates of a machine"),
        "recipe.outer_rate": ("Outer rate", "how much of a round goes into its update"),
        "recipe.outer_momentum": ("Outer momentum", ""),
        "recipe.feedback_decay": ("Error feedback", "how much of what compression dropped is kept"),
    },
    "The text and the rest": {
        "text.held_out": ("Held out", "share of the text kept for validation"),
        "text.shard_tokens": ("Tokens a shard", ""),
        "seed": ("Seed", "random, when left empty"),
        "quorum": ("Machines to wait for", "before training starts"),
        "report_every": ("Seconds between reports", "of each machine to this site"),
    },
}
OWN = {"quorum": 1, "report_every": 5.0}  # of the run rather than of its spec
PLAIN = ("recipe.token_budget", "text.source", "text.tokenizer")


@dataclasses.dataclass(frozen=True)
class PresetCard:
    name: str
    parameters: int
    shape: dict[str, int]
    chosen: bool


class RunForm(forms.Form):
    """Numbers are text here: 1e6, 1_000_000 and 1,000,000 all mean a million, and what was typed stays as typed."""

    name = forms.CharField(
        required=False, max_length=200, label="Name", help_text="Others see it, and it becomes the run's address."
    )
    preset = forms.ChoiceField(choices=[(name, name) for name in PRESETS], initial=START, label="Model")

    def __init__(self, *args, run: Run | None = None, **kwargs):
        self.run = run
        if run:
            kwargs["initial"] = _typed(run)
        super().__init__(*args, **kwargs)
        defaults = _flat(RunSpec(model=preset(START)))
        self.fields["recipe.token_budget"] = _number(
            "Token budget", "Training ends when all machines together have trained on so many.", "2000000"
        )
        self.fields["text.source"] = _choice("Text", SOURCES, SOURCE_WORDS)
        self.fields["text.tokenizer"] = _choice("Tokenizer", TOKENIZERS, TOKENIZER_WORDS)
        for section in ADVANCED.values():
            for name, (label, note) in section.items():
                if run and name in OWN:
                    continue
                if name == "recipe.schedule":
                    known = [(schedule, schedule.capitalize()) for schedule in SCHEDULES]
                    self.fields[name] = forms.ChoiceField(required=False, choices=known, label=label, help_text=note)
                    continue
                hint = "" if name == "seed" else str(OWN.get(name, defaults.get(name, "")))
                self.fields[name] = _number(label, note, hint)

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean()
        fields = {
            name: value.strip() if isinstance(value, str) else value
            for name, value in cleaned.items()
            if name not in ("name", "preset", *OWN)
        }
        fields["recipe.token_budget"] = fields.get("recipe.token_budget") or "2000000"
        own = self._own(cleaned)
        if not 1 <= len(" ".join(cleaned.get("name", "").split())) <= 80:
            self.add_error("name", "Give the run a name of 1 to 80 characters.")
        try:
            cleaned["spec"] = spec_from_fields(fields, cleaned.get("preset") or START)
        except SpecError as error:
            self.tell(error)
        cleaned.update(own)
        return cleaned

    def _own(self, cleaned: dict[str, Any]) -> dict[str, Any]:
        """Of the run itself. Their ranges are the run's to check."""
        found = {}
        for name, default in OWN.items():
            text = (cleaned.get(name) or "").strip().replace(",", "").replace("_", "")
            try:
                found[name] = type(default)(text) if text else default
            except ValueError:
                found[name] = default
                kind = "a whole number" if isinstance(default, int) else "a number"
                self.add_error(name, _sentence(f"must be {kind}, not '{text[:40]}'"))
        return found

    def tell(self, error: SpecError) -> None:
        """Each problem at its field; what has no field here, above the form."""
        for name, sentence in error.problems.items():
            if name in self.fields:
                if name not in self._errors:
                    self.add_error(name, _sentence(sentence))
            else:
                self.add_error(None, f"{name}: {sentence}")

    def save(self, owner) -> Run | None:
        """The run, made or changed; None when the run itself found problems, which are then at their fields."""
        cleaned = self.cleaned_data
        try:
            if self.run is None:
                own = {name: cleaned[name] for name in OWN}
                return Run.create(owner, cleaned["name"], cleaned["spec"], **own)
            if not self.run.edit(cleaned["name"], cleaned["spec"]):
                self.add_error(None, "The run was launched or changed meanwhile: go back and look at it again.")
                return None
            return self.run
        except SpecError as error:
            self.tell(error)
            return None

    # ---- for the template --------------------------------------------------------------------------------------

    def presets(self) -> list[PresetCard]:
        chosen = self["preset"].value()
        models = {name: preset(name) for name in PRESETS}
        return [
            PresetCard(name, model.parameters, {part: getattr(model, part) for part in SHAPE}, name == chosen)
            for name, model in models.items()
        ]

    def plain(self) -> list[forms.BoundField]:
        return [self[name] for name in PLAIN]

    def sections(self) -> list[tuple[str, list[forms.BoundField]]]:
        return [(title, [self[name] for name in names if name in self.fields]) for title, names in ADVANCED.items()]

    def opened(self) -> bool:
        """Whether something folded away has a value or a problem."""
        folded = [field for _, fields in self.sections() for field in fields]
        typed = self.data if self.is_bound else self.initial
        return any(field.errors or typed.get(field.name) not in (None, "", SCHEDULES[0]) for field in folded)

    def problems(self) -> list[tuple[str, str]]:
        """(id of the field, sentence): the list above the form."""
        return [(self[name].auto_id, next(iter(self.errors[name]))) for name in self.fields if name in self.errors]


def _number(label: str, note: str, placeholder: str) -> forms.CharField:
    attrs = {"placeholder": placeholder, "autocomplete": "off", "class": "number-input", "inputmode": "decimal"}
    return forms.CharField(
        required=False, max_length=40, label=label, help_text=note, widget=forms.TextInput(attrs=attrs)
    )


def _choice(label: str, known: tuple[str, ...], words: dict[str, str]) -> forms.ChoiceField:
    order = sorted(known, key=lambda name: list(words).index(name) if name in words else len(words))
    return forms.ChoiceField(
        required=False,
        choices=[(name, words.get(name, name)) for name in order],
        initial=order[0],
        label=label,
        widget=forms.RadioSelect,
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?")) else ".")


def _flat(spec: RunSpec) -> dict[str, Any]:
    raw = dataclasses.asdict(spec)
    parts = {f"{part}.{name}": value for part in ("model", "text", "recipe") for name, value in raw[part].items()}
    return {**parts, "seed": raw["seed"]}


def _typed(run: Run) -> dict[str, Any]:
    """A draft as somebody would have typed it: only what differs from the preset and the defaults."""
    spec = run.spec
    shape = dataclasses.asdict(spec.model)
    near = [name for name in PRESETS if all(shape[p] == getattr(preset(name), p) for p in ("layers", "width", "heads"))]
    chosen = near[0] if near else START
    defaults = {**_flat(RunSpec(model=preset(chosen, 256 if spec.text.tokenizer == "bytes" else None))), "seed": None}
    changed = {n: str(v) for n, v in _flat(spec).items() if n in PLAIN or v != defaults[n]}
    return {**changed, "name": run.name, "preset": chosen}
