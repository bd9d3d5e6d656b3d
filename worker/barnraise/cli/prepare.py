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
from barnraise.cli.machine_options import (
    HomeOption,
    MachineOptions,
    measure_machine,
    open_state_dir,
)
from barnraise.cli.option_groups import expand_option_groups
from barnraise.cli.progress import show_progress
from barnraise.cli.site_access import open_site
from barnraise.cli.text import (
    EXIT_REFUSED,
    TokenizerOption,
    load_tokenizer_option,
    print_inspection,
)

if TYPE_CHECKING:
    from barnraise.text.inspection import Inspection


@dataclass(frozen=True)
class PreparationOptions:
    """How a run's text is prepared."""

    model: Annotated[
        Path | None, typer.Option(help="Folder of the Hugging Face model that the run begins with.")
    ] = None
    tokenizer: TokenizerOption = ""
    replace: Annotated[
        bool, typer.Option("--replace", help="Prepare another text in place of the draft's.")
    ] = False
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask before the text is used.")
    ] = False


@expand_option_groups
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

    The text stays on this machine; its tokens go to the machines that train, once you join.

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
    preparation = TextPreparation(
        tuple(paths or ()), existing, partial(confirm_text, yes=options.yes), show_progress
    )
    view = prepare_text(state_dir, run.name, preparation, fetch_weights, options.replace)
    manifest = open_manifest(view)
    tokens = sum(shard.tokens for shard in manifest.train)
    next_command = f"[bold]barnraise join {escape(view.slug or view.id)}[/]"
    out.print(
        f"The text has {tokens:,} tokens, of a vocabulary of {manifest.vocabulary:,}. "
        f"Next, on this machine: {next_command}",
        soft_wrap=True,
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
