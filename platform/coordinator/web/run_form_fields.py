"""What the form of a run asks: each field's words, its choices and its place."""

from django import forms

from barnraise.spec import AUTO, SCHEDULES, STRATEGIES
from coordinator.runs.join_policy import Access

SOURCE_LABELS = {
    "stdlib": "Python's standard library (about 12 MB of source code)",
    "huggingface": "A Hugging Face dataset",
    "urls": "Addresses of text files",
    "files": "Files on my own machine",
}
TOKENIZER_LABELS = {
    "bpe": "Byte-pair encoding, learnt from the text",
    "bytes": "Bytes (256 tokens)",
}
ACCESS_LABELS = {
    Access.ANYONE: "Anyone",
    Access.INVITATION: "People I invite by a link",
    Access.TEAM: "A team of mine",
}
STRATEGY_LABELS = {
    "streams": "As said below; rounds end together by the clock, and are said a part at a time",
    "windows": "As said below, and rounds end together by the clock",
    "async": "As said below, and rounds end in each machine's own time",
}
CODEC_LABELS = {
    "auto": "As each machine's line allows",
    "dense8": "Every value, 8 bits",
    "dense4": "Every value, 4 bits",
    "dense2": "Every value, 2 bits",
    "top256x2": "The largest sixteenth, 2 bits",
    "top64x2": "The largest sixty-fourth, 2 bits",
}

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
        "recipe.strategy": ("Strategy", "nobody waits for anybody in any of them"),
        "recipe.codec": ("Updates say", "less of each update on slower lines"),
        "recipe.round_steps": (
            "Steps a round",
            "between two updates of a machine; its line decides where updates do",
        ),
        "recipe.outer_rate": ("Outer rate", "how much of a round goes into its update"),
        "recipe.outer_momentum": ("Outer momentum", ""),
        "recipe.speculation": (
            "Speculation",
            "trust in a guess of the updates that are under way; 0: none is made",
        ),
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
CHOICES = {  # the first is the default
    "recipe.schedule": [(name, name.capitalize()) for name in SCHEDULES],
    "recipe.strategy": [(AUTO, "Auto: rounds and updates as each machine's line allows")]
    + [(name, STRATEGY_LABELS.get(name, name)) for name in STRATEGIES],
    "recipe.codec": list(CODEC_LABELS.items()),
}
RUN_FIELDS = {"quorum": 1, "report_every": 5.0}  # of the run rather than of its spec
BASIC_FIELDS = ("recipe.token_budget", "text.source", "text.places", "text.tokenizer")
TERMS_FIELDS = ("access", "team", "least_memory", "least_device_memory", "notes")
NON_SPEC_FIELDS = ("name", "preset", "volunteers", *RUN_FIELDS, *TERMS_FIELDS)  # not of the spec


def number_field(label: str, note: str, placeholder: str) -> forms.CharField:
    """Numbers are text: 1e6, 1_000_000 and 1,000,000 all mean a million, and what was typed stays as typed."""
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


def choice_field(label: str, words: dict[str, str], note: str = "") -> forms.ChoiceField:
    """Radio buttons; the first is chosen."""
    return forms.ChoiceField(
        required=False,
        choices=list(words.items()),
        initial=next(iter(words)),
        label=label,
        help_text=note,
        widget=forms.RadioSelect,
    )


def text_field(label: str, note: str, rows: int, longest: int) -> forms.CharField:
    widget = forms.Textarea(attrs={"rows": rows, "spellcheck": "false"})
    return forms.CharField(
        required=False, max_length=longest, label=label, help_text=note, widget=widget, strip=False
    )


def terms_fields(owner) -> dict[str, forms.Field]:
    """Who may join, and the notes. A team is one of the owner's."""
    teams = [(str(team.pk), team.name) for team in owner.teams.all()] if owner else []
    known = {
        str(name): word for name, word in ACCESS_LABELS.items() if teams or name != Access.TEAM
    }
    team = (
        {}
        if not teams
        else {"team": forms.ChoiceField(required=False, choices=[("", "–"), *teams], label="Team")}
    )
    return {
        "access": choice_field("Who may join", known),
        **team,
        "least_memory": number_field("Least memory, GB", "of a machine that joins; empty: any", ""),
        "least_device_memory": number_field("Least GPU memory, GB", "empty: none is needed", ""),
        "notes": text_field("Notes", "For everybody who looks at the run, in Markdown.", 6, 40_000),
    }


def as_sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?")) else ".")


def normalise_number(text: str) -> str:
    return text.strip().replace(",", "").replace("_", "")
