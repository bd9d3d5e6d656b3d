"""The fields of the form of a run: labels, help texts, choices and sections."""

from collections.abc import Mapping

from django import forms

from barnraise.planning.lines import CLUSTER_LINE, HOME_LINE, LINES
from barnraise.spec import (
    ADAMW,
    AUTO,
    DECENTRALIZED_ADAM,
    MAX_PROMPTS,
    MIXING_BITS,
    MUON,
    PROMPT_LENGTH,
    REMOVED_STRATEGIES,
    SCHEDULES,
    Assumptions,
    RunSpec,
    preset,
)
from coordinator.accounts.models import User
from coordinator.runs.drafts import NewRun
from coordinator.runs.join_policy import Access, Visibility
from coordinator.runs.models import Run
from coordinator.runs.reference_machines import REFERENCE_MACHINES
from coordinator.runs.spec_form import FIELDS, fields_of_spec
from coordinator.telemetry.site_capacity import count_web_processes, describe_capacity

SOURCE_LABELS = {
    "stdlib": "Python's standard library (about 12 MB of source code)",
    "huggingface": "A Hugging Face dataset",
    "urls": "Addresses of text files",
    "files": "Files on my own machine",
}
# Each part is shown while its source is chosen.
SOURCE_HELP = (
    '<span data-help="files">Create the draft first; its page then shows the command for the '
    "machine that has the files.</span>"
)
PLACES_HELP = (
    '<span data-help="huggingface">A dataset as owner/name, with /config, :split, @revision or '
    "#column where needed.</span>"
    '<span data-help="urls">One address of a text, JSON, CSV or Parquet file per line.</span>'
)
TOKENIZER_LABELS = {
    "bpe": "Byte-pair encoding, trained on the text",
    "bytes": "Bytes (256 tokens)",
}
ACCESS_LABELS = {
    Access.ANYONE: "Anyone",
    Access.INVITATION: "People I invite by link",
    Access.TEAM: "One of my teams",
}
VISIBILITY_LABELS = {
    Visibility.PUBLIC: "Public",
    Visibility.UNLISTED: "Unlisted",
    Visibility.INVITED: "Participants only",
}
VISIBILITY_HELP = (
    "Unlisted: everyone with the address sees it, and no list shows it. "
    "Participants only: you, the people you invite or the team."
)
STRATEGY_LABELS = {
    AUTO: "Auto: chosen at launch for the expected machines and lines",
    "streams": "Updates in streams: rounds end by the clock, published in parts",
    "windows": "Updates in windows: rounds end by the clock",
    "async": "Updates, async: each machine ends its rounds itself",
    DECENTRALIZED_ADAM: "Decentralized Adam: averages weights in every step",
}
STRATEGY_HELP = (
    "Updates pay on home lines, where no machine waits for another. Decentralized Adam pays on "
    "lines from about 1 Gb/s and in clusters, among machines that trust each other."
)
TOPOLOGY_LABELS = {
    "exponential": "Exponential: one neighbour a step, another each time",
    "ring": "Ring: left and right neighbour alternately",
    "alternating-exponential-ring": "Alternating exponential ring",
    "complete": "Complete: everyone in every step",
}
CODEC_LABELS = {
    "auto": "Automatic",
    "dense8": "Every value, 8 bits",
    "dense4": "Every value, 4 bits",
    "dense2": "Every value, 2 bits",
    "top256x2": "Top 1/16 of values, 2 bits each",
    "top64x2": "Top 1/64 of values, 2 bits each",
}

# Section → dotted fields, of the spec or of `RUN_FIELDS`.
ADVANCED = {
    "Model": (
        "model.layers",
        "model.width",
        "model.heads",
        "model.key_value_heads",
        "model.head_size",
        "model.hidden",
        "model.context",
        "model.vocabulary",
        "model.rope_theta",
        "model.norm_epsilon",
        "model.qk_norm",
        "model.tied_head",
    ),
    "Optimizer": (
        "recipe.optimizer",
        "recipe.learning_rate",
        "recipe.matrix_rate",
        "recipe.schedule",
        "recipe.warmup_tokens",
        "recipe.weight_decay",
        "recipe.clip",
        "recipe.step_sequences",
        "recipe.evaluate_every",
    ),
    "Exchange": (
        "recipe.strategy",
        "assumed.line",
        "assumed.machine",
        "recipe.codec",
        "recipe.round_steps",
        "recipe.outer_rate",
        "recipe.outer_momentum",
        "recipe.delay_compensation",
        "recipe.feedback_decay",
        "recipe.mixing_topology",
        "recipe.mixing_bits",
        "recipe.mixing_interval",
        "recipe.mixing_accumulation",
    ),
    "Text and run": ("text.held_out", "text.shard_tokens", "seed", "quorum", "report_every"),
}
OPTIMIZER_LABELS = {
    ADAMW: "AdamW",
    MUON: "Muon: half the steps, longer ones",
}
OF_PRESET = [("", "As the preset"), ("True", "Yes"), ("False", "No")]
CHOICES: dict[str, list[tuple[str, str]]] = {  # the first is the default
    "model.qk_norm": OF_PRESET,
    "model.tied_head": OF_PRESET,
    "recipe.optimizer": list(OPTIMIZER_LABELS.items()),
    "recipe.schedule": [(name, name.capitalize()) for name in SCHEDULES],
    "recipe.strategy": list(STRATEGY_LABELS.items()),
    "recipe.mixing_topology": list(TOPOLOGY_LABELS.items()),
    "recipe.mixing_bits": [(str(bits), f"{bits} bits") for bits in MIXING_BITS],
    "assumed.line": [
        (line.spelling, f"{line.name}, {line}") for line in (HOME_LINE, *LINES[1:], CLUSTER_LINE)
    ],
    "assumed.machine": [
        (name, name)
        for name, _ in sorted(REFERENCE_MACHINES, key=lambda each: each[0] != Assumptions.machine)
    ],
    "recipe.codec": list(CODEC_LABELS.items()),
}
# What belongs to the run, not to its spec: (default, label, help).
RUN_FIELDS: dict[str, tuple[int | float, str, str]] = {
    "quorum": (1, "Minimum machines", "Training starts once this many have joined."),
    "report_every": (
        NewRun.report_every,
        "Report interval",
        "Seconds between two reports of a machine.",
    ),
}
RADIO_LABELS = {"text.source": SOURCE_LABELS, "text.tokenizer": TOKENIZER_LABELS}
TEXT_AREAS = {  # (rows, most characters)
    "text.places": (2, 9_000),
    "prompts": (3, 2 * MAX_PROMPTS * PROMPT_LENGTH),
}
BASIC_FIELDS = ("recipe.token_budget", "text.source", "text.places", "text.tokenizer", "prompts")
# Help that explains choices, or is shown with one of them.
CHOICE_HELP = {
    "text.source": SOURCE_HELP,
    "text.places": PLACES_HELP,
    "recipe.strategy": STRATEGY_HELP,
}
DEFAULT_PRESET = "gpt-nano"
DEFAULT_BUDGET = "2000000"  # tokens
# What an empty field stands for; an empty seed is a random one.
PLACEHOLDERS = {
    **fields_of_spec(RunSpec(model=preset(DEFAULT_PRESET))),
    "recipe.token_budget": DEFAULT_BUDGET,
    "recipe.matrix_rate": "",
    "seed": "",
}


def run_field(name: str) -> forms.Field:
    """Build the field of a setting of the run that its spec does not hold."""
    default, label, note = RUN_FIELDS[name]
    if name == "report_every":
        note = f"{note} {describe_capacity(count_web_processes(), default)}"
    return number_field(label, note, str(default))


def spec_field(name: str, value: str | None = None) -> forms.Field:
    """Build the field of a setting by its dotted name; a present value stays among the choices."""
    shown = FIELDS[name].metadata
    label = shown["label"]
    note = CHOICE_HELP[name] if name in CHOICE_HELP else shown["help"]
    if name in RADIO_LABELS:
        return choice_field(label, RADIO_LABELS[name], note)
    if name in TEXT_AREAS:
        return text_field(label, note, *TEXT_AREAS[name])
    if name not in CHOICES:
        return number_field(label, note, str(PLACEHOLDERS[name]))
    choices = CHOICES[name]
    if value is not None and value not in dict(choices):
        choices = [*choices, (value, value)]
    field_class = StrategyField if name == "recipe.strategy" else forms.ChoiceField
    return field_class(required=False, choices=choices, label=label, help_text=note)


class StrategyField(forms.ChoiceField):
    """A strategy of runs; one of earlier versions is refused with what to use instead."""

    def validate(self, value: str) -> None:
        """Refuse what is no strategy."""
        if value in REMOVED_STRATEGIES:
            raise forms.ValidationError(as_sentence(REMOVED_STRATEGIES[value]))
        super().validate(value)


def number_field(label: str, note: str, placeholder: str) -> forms.CharField:
    """Build a text field for a number, so that 1e6 and 1,000,000 are accepted and kept."""
    attrs = {
        "placeholder": placeholder,
        "autocomplete": "off",
        "class": "number-input",
        "inputmode": "decimal",
    }
    return forms.CharField(
        required=False,
        max_length=40,
        label=label,
        help_text=note,
        widget=forms.TextInput(attrs=attrs),
    )


def choice_field(label: str, labels: Mapping[str, str], note: str = "") -> forms.ChoiceField:
    """Build radio buttons with the first one selected."""
    return forms.ChoiceField(
        required=False,
        choices=list(labels.items()),
        initial=next(iter(labels)),
        label=label,
        help_text=note,
        widget=forms.RadioSelect,
    )


def text_field(label: str, note: str, rows: int, max_length: int) -> forms.CharField:
    """Build a field for several lines."""
    widget = forms.Textarea(attrs={"rows": rows, "spellcheck": "false"})
    return forms.CharField(
        required=False,
        max_length=max_length,
        label=label,
        help_text=note,
        widget=widget,
        strip=False,
    )


def terms_fields(owner: User | None, run: Run | None = None) -> dict[str, forms.Field]:
    """Build the fields for access and notes.

    The teams are the owner's. The present access and team of a run are always among the choices,
    although its owner may have left the team: an edit of the notes alone changes neither.
    """
    owner = run.owner if run else owner
    teams = {str(team.pk): team.name for team in owner.teams.all()} if owner else {}
    if run and run.team:
        teams.setdefault(str(run.team.pk), run.team.name)
    has_team = bool(teams) or (run is not None and run.access == Access.TEAM)
    access_labels = {str(access): label for access, label in ACCESS_LABELS.items()}
    if not has_team:
        del access_labels[Access.TEAM]
    access = choice_field("Participants", access_labels)
    if run:
        access.required = True
        access.error_messages["required"] = "Choose who may join."
    fields: dict[str, forms.Field] = {"access": access}
    if has_team:
        fields["team"] = forms.ChoiceField(
            required=False, choices=[("", "–"), *teams.items()], label="Team"
        )
    visibility_labels = {str(value): label for value, label in VISIBILITY_LABELS.items()}
    fields["visibility"] = choice_field("Visibility", visibility_labels, VISIBILITY_HELP)
    fields["min_memory"] = number_field("Minimum RAM (GB)", "Leave empty for any.", "")
    fields["min_device_memory"] = number_field(
        "Minimum GPU memory (GB)", "Leave empty if no GPU is needed.", ""
    )
    fields["notes"] = text_field("Notes", "Public, in Markdown.", 6, 40_000)
    return fields


def as_sentence(text: str) -> str:
    """Capitalise a text and end it with a full stop."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?")) else ".")
