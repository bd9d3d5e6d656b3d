"""Write the model card of an export: what the model is and how it was trained. Pure."""

import json
from dataclasses import dataclass

from barnraise.formats import format_parameters, format_share
from barnraise.protocol.evaluation import TaskScore
from barnraise.spec import ModelSpec, RunSpec
from barnraise.spec.architectures import architecture_of
from barnraise.training.model_files.transformers_formats import format_of

CARD_FILE = "README.md"
SOURCE_NAMES = {
    "stdlib": "the source code of Python's standard library",
    "huggingface": "the Hugging Face dataset",
    "urls": "files from",
    "files": "files of the run's owner",
}


@dataclass(frozen=True)
class CardFacts:
    """What a model card states."""

    name: str
    run: str
    spec: RunSpec
    tokens: int  # that the model was trained on
    machines: int  # how many machines' updates are in it
    # (tokens, nats a token) of the last validation on this machine, if there was one.
    validation: tuple[int, float] | None = None
    # An identifier of the Hugging Face hub's list; "unknown" where nobody chose one.
    licence: str = "unknown"
    score: TaskScore | None = None  # of the run's own tasks, if they were answered here


def write_card(facts: CardFacts) -> str:
    """Return the text of the card: YAML for the hub, then Markdown for people."""
    spec = facts.spec
    header = {
        "license": facts.licence,
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": [format_of(spec.model).model_type, "barnraise"],
    }
    if spec.text.source == "huggingface":
        header["datasets"] = [_dataset_of(spec.text.places[0])]
    if spec.start.model and spec.start.model != "folder":
        header["base_model"] = spec.start.model.partition("@")[0]
    lines = [f"{name}: {json.dumps(value)}" for name, value in header.items()]
    rows = [
        ("Run", f"{_strip_markup(facts.name)} (`{facts.run}`)"),
        ("Text", _describe_text(spec)),
        ("Tokens trained on", f"{facts.tokens:,}"),
        ("Contributors", f"{facts.machines:,} machine{'' if facts.machines == 1 else 's'}"),
        ("Validation loss", _describe_loss(facts.validation)),
        *([("Multiple choice", _describe_score(facts.score))] if facts.score else []),
        ("Architecture", _describe_model(spec.model)),
        ("Tokenizer", f"{spec.text.tokenizer}, {spec.model.vocabulary:,} tokens"),
        ("Licence", facts.licence),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return "\n".join(
        [
            "---",
            *lines,
            "---",
            "",
            f"# {_strip_markup(facts.name)}",
            "",
            "A GPT that volunteers trained together with Barnraise.",
            "",
            "| | |",
            "|---|---|",
            table,
            "",
            "```python",
            "from transformers import pipeline",
            "",
            'generate = pipeline("text-generation", model=".")',
            'print(generate("Once upon a time", max_new_tokens=40)[0]["generated_text"])',
            "```",
            "",
            f"The model reads at most {spec.model.context:,} tokens at a time, the prompt and the "
            "generated text together. It has learnt from its text alone and was not made safe or "
            "truthful.",
            "",
        ]
    )


def _dataset_of(place: str) -> str:
    """Return owner/name of a dataset that a run's text comes from."""
    return "/".join(place.partition("#")[0].partition("@")[0].split("/")[:2])


def _describe_text(spec: RunSpec) -> str:
    places = ", ".join(f"`{_strip_markup(place)}`" for place in spec.text.places)
    return f"{SOURCE_NAMES.get(spec.text.source, spec.text.source)} {places}".strip()


def _describe_loss(validation: tuple[int, float] | None) -> str:
    if validation is None:
        return "not measured on the machine that exported it"
    tokens, loss = validation
    return f"{loss:.4f} nats a token, after {tokens:,} tokens"


def _describe_score(score: TaskScore) -> str:
    share = format_share(score.correct / score.count)
    return (
        f"{score.correct:,} of {score.count:,} tasks right ({share}), after {score.tokens:,} tokens"
    )


def _describe_model(model: ModelSpec) -> str:
    return (
        f"{architecture_of(model).title}: {format_parameters(model.parameters)}, {model.layers} "
        f"layers, width {model.width}, {model.heads} heads, context {model.context:,}"
    )


def _strip_markup(text: str) -> str:
    """Return a text without characters that mean something in Markdown's tables or HTML."""
    return "".join(" " if c in "|<>`\n\r" else c for c in text)
