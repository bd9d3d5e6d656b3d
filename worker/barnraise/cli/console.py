"""Write to the terminal, and log to it."""

import io
import json
import logging
import sys
from typing import Any

from rich.console import Console, ConsoleRenderable
from rich.highlighter import NullHighlighter
from rich.logging import RichHandler
from rich.table import Table
from rich.text import Text

from barnraise.coordinator_client.redaction import SecretFilter

out = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

STATUS_LOGGER = "barnraise.status"  # its lines are the status of a worker, every now and then


def replace_unprintable() -> None:
    """Print "?" for a character that a console or a file cannot encode, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def print_json(value: Any) -> None:
    """Print a value as one line of JSON for programs."""
    print(json.dumps(value))


def new_table(*columns: str, **options: Any) -> Table:
    """Return an empty table without lines, as all commands print them."""
    return Table(*columns, box=None, pad_edge=False, **options)


class TerminalLogHandler(RichHandler):
    """A log on a terminal: the time, and the message, which says its level only if it matters."""

    def __init__(self) -> None:
        super().__init__(
            console=errors,
            show_path=False,
            show_level=False,
            log_time_format="%H:%M:%S",
            rich_tracebacks=True,
            highlighter=NullHighlighter(),
        )
        self.setFormatter(logging.Formatter("%(message)s"))

    def render_message(self, record: logging.LogRecord, message: str) -> ConsoleRenderable:
        """Return a message; a warning or an error begins with that word, in its colour."""
        if record.levelno < logging.WARNING:
            return Text(message)
        style = "yellow" if record.levelno < logging.ERROR else "bold red"
        return Text.assemble((f"{record.levelname.lower()}: ", style), message)


def configure_logging(log_file: logging.Handler | None = None) -> None:
    """Log to stderr, and to a file as well if one is given.

    A terminal gets colours and short times, anything else one plain line per record.
    """
    handler: logging.Handler = TerminalLogHandler()
    if not errors.is_terminal:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    elif log_file is not None:
        handler.addFilter(lambda record: record.name != STATUS_LOGGER)  # a panel shows it
    handlers = [handler] if log_file is None else [handler, log_file]
    for each in handlers:
        each.addFilter(SecretFilter())
    logging.basicConfig(level=logging.INFO, handlers=handlers)
    for library in ("httpx", "httpx2", "gguf"):  # httpx2 is huggingface_hub's
        logging.getLogger(library).setLevel(logging.WARNING)
