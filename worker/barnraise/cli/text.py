"""Run `barnraise text inspect`: show what a text is before anything of it is shared."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from barnraise.cli.console import configure_logging, errors, new_table, out, print_json
from barnraise.cli.help_format import HelpfulTyper
from barnraise.cli.machine_options import JsonOption
from barnraise.cli.progress import show_progress
from barnraise.coordinator_client.redaction import redact
from barnraise.errors import TextError
from barnraise.formats import format_bytes
from barnraise.protocol.types import replace_unprintable
from barnraise.spec import MAX_VOCABULARY

if TYPE_CHECKING:
    from barnraise.text.existing_tokenizer import ExistingTokenizer
    from barnraise.text.inspection import Inspection

EXIT_REFUSED = 2  # the text cannot be used
SHOWN_FILES = 20  # in a table; --json lists all
SHOWN_WARNINGS = 12
MIN_FULL_WIDTH = 80  # columns of a terminal that shows all columns of the table of files
USUAL_ENCODING = "utf-8"
INDENT = (0, 0, 0, 2)

TokenizerOption = Annotated[
    str,
    typer.Option(
        "--tokenizer",
        metavar="PLACE",
        help="An existing tokenizer: a folder with a tokenizer.json, or hf:owner/name.",
    ),
]
text = HelpfulTyper(no_args_is_help=True, help="Look at a text before a run uses it.")


@text.callback()
def text_commands() -> None:
    """Look at a text before a run uses it."""


@text.command()
def inspect(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE…",
            help="Files, folders, addresses or hf:owner/name; #column after one names its column.",
        ),
    ],
    tokenizer: TokenizerOption = "",
    vocabulary: Annotated[
        int,
        typer.Option(
            min=300, max=MAX_VOCABULARY, help="Tokens of the vocabulary, for the estimate."
        ),
    ] = 2048,
    context: Annotated[
        int,
        typer.Option(min=0, max=16_384, help="Context of the model, to check the text's length."),
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Show which files a text has, what is left out and why, and what is in it.

    Nothing is sent anywhere. The exit code is 0 if a run can use the text, and 2 if not.
    """
    from barnraise.text.inspection import Inspection, inspect_source
    from barnraise.text.places import parse_place
    from barnraise.text.reading import open_source
    from barnraise.text.shards import TextPlan

    configure_logging()
    try:
        existing = load_tokenizer_option(tokenizer)
        plan = TextPlan(
            vocabulary=vocabulary,
            context=context,
            tokenizer_file=existing.file if existing else None,
        )
        places = [parse_place(source) for source in sources]
        with show_progress() as progress, open_source(places, progress=progress) as source:
            if existing:
                source.render_chat = existing.render_chat
            inspection = inspect_source(source, plan, progress)
    except TextError as error:
        inspection = Inspection(refusal=str(error))
    if as_json:
        print_json(_redact_all(inspection.to_json()))
        if inspection.refusal:
            _print_refusal(inspection)
    else:
        print_inspection(inspection)
    if inspection.refusal:
        raise typer.Exit(EXIT_REFUSED)


def _redact_all(value: Any) -> Any:
    """Return a value for JSON whose texts are redacted: addresses may hold passwords."""
    if isinstance(value, dict):
        return {name: _redact_all(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_redact_all(part) for part in value]
    return redact(value) if isinstance(value, str) else value


def load_tokenizer_option(place: str) -> "ExistingTokenizer | None":
    """Load the tokenizer that an option names, if it names one.

    Raises:
        TextError: it cannot be loaded.
    """
    if not place:
        return None
    from barnraise.text.existing_tokenizer import load_existing_tokenizer

    return load_existing_tokenizer(place)


def print_inspection(inspection: "Inspection") -> None:
    """Print an inspection for people."""
    if inspection.files:
        out.print(f"[bold]Read[/] ({len(inspection.files):,})")
        out.print(Padding(_file_table(inspection), INDENT))
    if inspection.left_out:
        out.print(f"\n[bold]Left out[/] ({len(inspection.left_out):,})")
        out.print(Padding(_left_out_table(inspection), INDENT))
    if inspection.files:
        out.print("\n[bold]Text[/]")
        out.print(Padding(_totals_table(inspection), INDENT))
    if inspection.samples and not inspection.refusal:
        out.print("\n[bold]First lines of some documents[/]")
        for number, sample in enumerate(inspection.samples, 1):
            out.print(Padding(_first_lines(number, sample), INDENT))
    if inspection.warnings:
        out.print()
    for warning in inspection.warnings[:SHOWN_WARNINGS]:
        _print_sentence("[yellow]warning:[/]", warning)
    if len(inspection.warnings) > SHOWN_WARNINGS:
        more = len(inspection.warnings) - SHOWN_WARNINGS
        errors.print(f"[yellow]and {more:,} more warnings:[/] --json lists all")
    if inspection.refusal:
        _print_refusal(inspection)
    else:
        out.print("\n[green]A run can use this text.[/]")


def _print_refusal(inspection: "Inspection") -> None:
    _print_sentence("[bold red]barnraise:[/]", inspection.refusal)


def _print_sentence(label: str, sentence: str) -> None:
    """Print a sentence on stderr; in a log it stays on one line."""
    shown = escape(redact(replace_unprintable(sentence)))
    errors.print_sentence(f"{label} {shown}")


def _file_table(inspection: "Inspection") -> Table:
    # A narrow terminal needs the room for the names.
    has_encodings = out.width >= MIN_FULL_WIDTH or any(
        file.encoding != USUAL_ENCODING for file in inspection.files
    )
    table = new_table("file", "format", *(["encoding"] if has_encodings else []))
    table.add_column("documents", justify="right")
    table.add_column("text", justify="right")
    for file in inspection.files[:SHOWN_FILES]:
        table.add_row(
            escape(redact(replace_unprintable(file.path))),
            file.format,
            *([file.encoding] if has_encodings else []),
            f"{file.documents:,}",
            format_size(file.bytes),
        )
    if len(inspection.files) > SHOWN_FILES:
        rest = inspection.files[SHOWN_FILES:]
        table.add_row(
            f"[dim]and {len(rest):,} more files[/]",
            *[""] * (2 if has_encodings else 1),
            f"{sum(file.documents for file in rest):,}",
            format_size(sum(file.bytes for file in rest)),
        )
    return table


def _left_out_table(inspection: "Inspection") -> Table:
    table = new_table(show_header=False)
    table.add_column(overflow="fold")
    table.add_column(style="dim", overflow="fold")
    for item in inspection.left_out[:SHOWN_FILES]:
        table.add_row(escape(redact(replace_unprintable(item.path))), escape(item.reason))
    if len(inspection.left_out) > SHOWN_FILES:
        table.add_row(
            f"[dim]and {len(inspection.left_out) - SHOWN_FILES:,} more[/]", "--json lists all"
        )
    return table


def _totals_table(inspection: "Inspection") -> Table:
    table = new_table(show_header=False)
    table.add_column()
    table.add_column()
    noun = "copy" if inspection.duplicates == 1 else "copies"
    copies = f" ({inspection.duplicates:,} {noun} left out)" if inspection.duplicates else ""
    table.add_row("documents", f"{inspection.documents:,}{copies}")
    size = f"{format_size(inspection.bytes)}, {inspection.characters:,} characters"
    table.add_row("size", size)
    if inspection.skipped_rows:
        table.add_row("rows skipped", f"{inspection.skipped_rows:,}")
    if inspection.tokens:
        table.add_row("tokens", f"about {round_count(inspection.tokens):,}")
    if inspection.round_trip:
        table.add_row("decoded", inspection.round_trip)
    return table


def format_size(count: int) -> str:
    """Write a number of bytes; a small one exactly."""
    return f"{count} B" if count < 1000 else format_bytes(count)


def round_count(count: int) -> int:
    """Round an estimate to two digits."""
    digits = max(0, len(str(count)) - 2)
    return round(count, -digits)


def _first_lines(number: int, sample: str) -> Text:
    lines = [line for line in sample.split("\n") if line.strip()][:2]
    shown = Text(
        f"{number:>2} │ " + "\n   │ ".join(replace_unprintable(line).strip() for line in lines),
        style="dim",
        overflow="ellipsis",
    )
    shown.no_wrap = True
    return shown
