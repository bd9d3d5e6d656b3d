"""The fields of the form of a run: labels, help texts, choices and sections."""

from collections.abc import Mapping

from django import forms

from barnraise.planning.lines import CLUSTER_LINE, HOME_LINE, LINES
from barnraise.spec import (
    AUTO,
    DECENTRALIZED_ADAM,
    MIXING_BITS,
    MIXING_TOPOLOGIES,
    REMOVED_STRATEGIES,
    SCHEDULES,
    Assumptions,
)
from coordinator.accounts.models import User
from coordinator.runs.join_policy import Access, Visibility
from coordinator.runs.models import Run
from coordinator.runs.reference_machines import REFERENCE_MACHINES

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

# Section → dotted field → (label, help); the placeholder shows the default.
ADVANCED: dict[str, dict[str, tuple[str, str]]] = {
    "Model": {
        "model.layers": ("Layers", ""),
        "model.width": ("Width", "Must be divisible by the heads."),
        "model.heads": ("Heads", ""),
        "model.context": ("Context", "Tokens the model attends to."),
        "model.vocabulary": ("Vocabulary", "Number of tokens in the tokenizer."),
    },
    "Optimizer": {
        "recipe.learning_rate": ("Learning rate", "Peak value."),
        "recipe.schedule": ("Learning rate schedule", ""),
        "recipe.warmup_tokens": ("Warm-up", "Tokens until the learning rate reaches its peak."),
        "recipe.weight_decay": ("Weight decay", ""),
        "recipe.clip": ("Gradient clipping", "Maximum gradient norm."),
        "recipe.step_sequences": ("Sequences per step", "On each machine."),
        "recipe.evaluate_every": ("Validation interval", "Tokens of the whole run."),
    },
    "Exchange": {
        "recipe.strategy": ("Strategy", STRATEGY_HELP),
        "assumed.line": ("Expected lines", "Of each machine; auto chooses the strategy for them."),
        "assumed.machine": ("Expected machines", "Auto chooses the strategy for them."),
        "recipe.codec": ("Compression", "Slower uplinks send smaller updates."),
        "recipe.round_steps": (
            "Steps per round",
            "Between two updates of a machine; automatic compression decides it too.",
        ),
        "recipe.outer_rate": ("Outer learning rate", "Share of a round that goes into its update."),
        "recipe.outer_momentum": ("Outer momentum", ""),
        "recipe.delay_compensation": (
            "Delay compensation",
            "Weight of the prediction for updates in flight; 0 disables it.",
        ),
        "recipe.feedback_decay": (
            "Error feedback",
            "Share of the compression error that is carried over.",
        ),
        "recipe.mixing_topology": (
            "Topology",
            "Who averages with whom, in decentralized Adam. Counts other than powers of two idle a "
            "machine now and then.",
        ),
        "recipe.mixing_bits": ("Bits per weight", "That neighbours send, in decentralized Adam."),
        "recipe.mixing_interval": (
            "Steps between averagings",
            "In decentralized Adam; 1 averages in every step.",
        ),
        "recipe.mixing_accumulation": (
            "Gradient accumulation of the moments",
            "In decentralized Adam: steps whose mean gradient Adam's moments absorb at once. More "
            "machines allow more; 1 is plain AdamW.",
        ),
    },
    "Text and run": {
        "text.held_out": ("Validation split", "Share of the text held out for validation."),
        "text.shard_tokens": ("Tokens per shard", ""),
        "seed": ("Seed", "Random if left empty."),
        "quorum": ("Minimum machines", "Training starts once this many have joined."),
        "report_every": ("Report interval", "Seconds between two reports of a machine."),
    },
}
DEFAULT_MACHINE = Assumptions.machine


def _other_machines(name: str) -> list[str]:
    return [other for other, _ in REFERENCE_MACHINES if other != name]


CHOICES: dict[str, list[tuple[str, str]]] = {  # the first is the default
    "recipe.schedule": [(name, name.capitalize()) for name in SCHEDULES],
    "recipe.strategy": list(STRATEGY_LABELS.items()),
    "recipe.mixing_topology": [
        (name, label) for name, label in TOPOLOGY_LABELS.items() if name in MIXING_TOPOLOGIES
    ],
    "recipe.mixing_bits": [(str(bits), f"{bits} bits") for bits in MIXING_BITS],
    "assumed.line": [
        (line.spelling, f"{line.name}, {line}") for line in (HOME_LINE, *LINES[1:], CLUSTER_LINE)
    ],
    "assumed.machine": [
        (name, name) for name in (DEFAULT_MACHINE, *_other_machines(DEFAULT_MACHINE))
    ],
    "recipe.codec": list(CODEC_LABELS.items()),
}
RUN_FIELDS: dict[str, int | float] = {
    "quorum": 1,
    "report_every": 5.0,
}  # belong to the run, not to its spec
BASIC_FIELDS = (
    *("recipe.token_budget", "text.source", "text.places", "text.tokenizer", "prompts"),
)
TERMS_FIELDS = ("access", "team", "visibility", "min_memory", "min_device_memory", "notes")
NON_SPEC_FIELDS = (
    *("name", "preset", "volunteers", "start.kind", "start.checkpoint", "start.model"),
    *(*RUN_FIELDS, *TERMS_FIELDS),
)


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

    Args:
        owner: of a new run; None for nobody.
        run: the run that is edited, which must name its access; None for a new one.
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


def normalise_number(text: str) -> str:
    """Remove spaces, commas and underscores."""
    return text.strip().replace(",", "").replace("_", "")
