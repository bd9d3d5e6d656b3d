"""Write to the terminal, log to it, and react to Ctrl-C."""

import io
import json
import logging
import signal
import sys
import threading
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table

from barnraise.cli.redaction import SecretFilter

out = Console(highlight=False)
errors = Console(stderr=True, highlight=False)


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


def configure_logging() -> None:
    """Log to stderr: coloured on a terminal, one plain line per record elsewhere."""
    handler: logging.Handler = RichHandler(console=errors, show_path=False, rich_tracebacks=True)
    if not errors.is_terminal:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(SecretFilter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for library in ("httpx", "httpx2", "gguf"):  # httpx2 is huggingface_hub's
        logging.getLogger(library).setLevel(logging.WARNING)


def stop_on_signals() -> threading.Event:
    """Return an event that the first Ctrl-C (or SIGTERM) sets; a second one ends the program."""
    leaving = threading.Event()

    def leave(number: int, frame: Any) -> None:
        if leaving.is_set():
            raise KeyboardInterrupt
        leaving.set()
        errors.print("Stopping … (Ctrl-C again to stop at once)")

    signal.signal(signal.SIGINT, leave)
    signal.signal(signal.SIGTERM, leave)
    return leaving
