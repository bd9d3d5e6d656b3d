"""Run `barnraise prepare`: show a run's text to its owner, then turn it into tokens."""

import sys
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from barnraise.cli.addresses import RunArgument
from barnraise.cli.console import configure_logging, errors, out
from barnraise.cli.evaluate import request_of_run
from barnraise.cli.machine_options import (
    HomeOption,
    MachineOptions,
    measure_machine,
    open_state_dir,
)
from barnraise.cli.option_groups import option
from barnraise.cli.progress import show_progress
from barnraise.cli.site_access import open_site
from barnraise.cli.text import (
    EXIT_REFUSED,
    TokenizerOption,
    load_tokenizer_option,
    print_inspection,
)
from barnraise.errors import TextError
from barnraise.protocol.evaluation import PREVIEW_LENGTH, PreviewDocument, PublishedTexts

if TYPE_CHECKING:
    from barnraise.text.inspection import Inspection


@dataclass(frozen=True)
class PreparationOptions:
    """How a run's text is prepared."""

    model: Path | None = option(None, "Folder of the Hugging Face model that the run begins with.")
    tokenizer: TokenizerOption = ""
    replace: bool = option(False, "Prepare another text in place of the draft's.", "--replace")
    preview: str | None = option(
        None,
        "Documents whose beginnings the run's page shows (default: ask).",
        metavar="1,3|all|none",
    )
    yes: bool = option(False, "Do not ask before the text is used.", "--yes", "-y")


def prepare(
    run: RunArgument,
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            help="Files and folders, where the text comes from files; #column names a column.",
        ),
    ] = None,
    *,
    options: PreparationOptions,
    home: HomeOption = None,
) -> None:
    """Prepare your run's text, and the model it begins with: show the text, ask, make tokens.

    The text stays on this machine; its tokens go to the machines that train, once you join. Of up
    to ten documents that you choose the run's page shows the beginning.

    After an interruption, the same command continues.

    Example: barnraise prepare my-run books/ notes.jsonl#body
    """
    from barnraise.training.join import open_manifest, prepare_text
    from barnraise.training.preparation import TextPreparation
    from barnraise.training.warm_start import fetch_initial_weights

    configure_logging()
    state_dir = open_state_dir(home)
    open_site(state_dir, run)
    fetch_weights = partial(
        fetch_initial_weights,
        state_dir,
        threading.Event(),
        lambda: measure_machine(state_dir, MachineOptions()),
        model_folder=options.model,
    )
    existing = load_tokenizer_option(options.tokenizer)
    shown: list[str] = []

    def confirm(inspection: "Inspection") -> bool:
        is_used = confirm_text(inspection, options.yes)
        shown.extend(choose_preview(inspection.samples, options.preview, options.yes))
        return is_used

    preparation = TextPreparation(tuple(paths or ()), existing, confirm, show_progress)
    view = prepare_text(state_dir, run.name, preparation, fetch_weights, options.replace)
    manifest = open_manifest(view)
    if shown:
        documents = [PreviewDocument(text=text) for text in shown]
        request_of_run(state_dir, "POST", view.id, "published", PublishedTexts(preview=documents))
    tokens = sum(shard.tokens for shard in manifest.train)
    next_command = f"[bold]barnraise join {escape(view.slug or view.id)}[/]"
    out.print_sentence(
        f"The text has {tokens:,} tokens, of a vocabulary of {manifest.vocabulary:,}.\n"
        f"Next, on this machine: {next_command}"
    )


def confirm_text(inspection: "Inspection", yes: bool) -> bool:
    """Show a text to its owner and ask whether to use it.

    Raises:
        typer.Exit: the text cannot be used, or the owner declines.
    """
    print_inspection(inspection)
    if inspection.refusal:
        raise typer.Exit(EXIT_REFUSED)
    if yes:
        return True
    if not sys.stdin.isatty():
        errors.print("Nothing was prepared: --yes prepares it without asking.")
        raise typer.Exit(1)
    out.print("\nThe tokens of this text go to every machine that joins the run.")
    return typer.confirm("Use it?", default=False, abort=True)


def choose_preview(documents: list[str], choice: str | None, yes: bool) -> list[str]:
    """Return the beginnings that the run's page shows: those that the owner chooses.

    Args:
        documents: the beginnings of some documents, as they were shown with their numbers.
        choice: of numbers, "all" or "none"; None asks, where somebody is there to answer.
        yes: whether nobody is asked: then no document is published without a choice.

    Raises:
        TextError: the choice is no list of their numbers.
    """
    if choice is None:
        if yes or not documents:
            return []
        out.print("\nThe run's page can show the beginnings of some of these documents.")
        choice = str(typer.prompt("Which? Numbers such as 1,3, all or none", default="none"))
    words = choice.replace(",", " ").split()
    if words == ["all"]:
        chosen = documents
    elif words in ([], ["none"]):
        chosen = []
    else:
        is_number = all(word.isdecimal() and len(word) <= len("10") for word in words)
        numbers = dict.fromkeys(map(int, words)) if is_number else {0: None}
        if not all(1 <= number <= len(documents) for number in numbers):
            raise TextError(f"--preview takes numbers from 1 to {len(documents)}, all or none")
        chosen = [documents[number - 1] for number in numbers]
    from barnraise.text.prompt_codec import make_printable

    printable = (make_printable(text)[:PREVIEW_LENGTH].strip() for text in chosen)
    return [text for text in printable if text]
