"""Write to the terminal, and log to it."""

import io
import json
import logging
import re
import sys
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text
from rich.traceback import Traceback

from barnraise.coordinator_client.redaction import SecretFilter
from barnraise.peering.limits.repeated_warnings import STRANGERS_LOGGER
from barnraise.protocol.types import replace_controls


class SafeConsole(Console):
    """A console on which no text of others controls the terminal or hides where a link leads.

    Names, errors and notices come from sites, peers and files. Only this program's own styles reach
    the terminal as escape sequences.
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render as Rich does, without links and what cannot be seen."""
        for text, style, control in super().render(renderable, options):
            if control is not None:
                yield Segment(text, style, control)
                continue
            visible = style.update_link(None) if style and style.link else style
            yield Segment("\n".join(map(replace_controls, text.split("\n"))), visible)

    def print_sentence(self, sentence: str) -> None:
        """Print a sentence: on a terminal it breaks between words, and addresses stay whole."""
        text = Text.from_markup(sentence)
        lines = wrap_words(text, self.width) if self.is_terminal else [text]
        self.print(*lines, sep="\n", soft_wrap=True)


def wrap_words(text: Text, width: int) -> list[Text]:
    """Break a text between words into lines of at most `width` columns; no word is broken."""
    lines: list[Text] = []
    for line in text.split(allow_blank=True):
        breaks, used = [], 0
        for word in re.finditer(r"\S+\s*", line.plain):
            if used and used + cell_len(word[0].rstrip()) > width:
                breaks.append(word.start())
                used = 0
            used += cell_len(word[0])
        lines += line.divide(breaks)
    for line in lines:
        line.rstrip()
    return lines


out = SafeConsole(highlight=False)
errors = SafeConsole(stderr=True, highlight=False)

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
    """Return an empty table without lines, as all commands print them; it cuts nothing off."""
    table = Table(*columns, box=None, pad_edge=False, **options)
    for column in table.columns:
        column.overflow = "fold"
    return table


class SafeFormatter(logging.Formatter):
    """A line of a log, with the time and the level; no text in it controls a terminal."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and those of a traceback."""
        return "\n".join(map(replace_controls, super().format(record).split("\n")))


class TerminalLogHandler(logging.Handler):
    """A log on a terminal: the time, and the message, which says its level only if it matters."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record; a long message goes on below itself, and addresses stay whole."""
        try:
            time = f"{datetime.fromtimestamp(record.created):%H:%M:%S} "
            room = errors.width - len(time)
            first, *rest = wrap_words(_describe_record(record), room)
            # An address that is longer than the room needs the whole width to stay whole.
            below = [Text(" " * len(time) * (line.cell_len <= room)) + line for line in rest]
            message = Text("\n").join([first, *below])
            errors.print(Text.assemble((time, "log.time"), message), soft_wrap=True)
            if record.exc_info and record.exc_info[0] is not None:
                errors.print(Traceback.from_exception(*record.exc_info))
        except Exception:  # a message that cannot be printed ends no training
            self.handleError(record)


def _describe_record(record: logging.LogRecord) -> Text:
    """Return a message; a warning or an error begins with that word, in its colour."""
    message = record.getMessage()
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
        handler.setFormatter(SafeFormatter())
    elif log_file is not None:
        # A panel shows the status, and a log file is the place for what strangers do.
        handler.addFilter(lambda record: record.name not in (STATUS_LOGGER, STRANGERS_LOGGER))
    handlers = [handler] if log_file is None else [handler, log_file]
    for each in handlers:
        each.addFilter(SecretFilter())
    logging.basicConfig(level=logging.INFO, handlers=handlers)
    for library in ("httpx", "httpx2", "gguf"):  # httpx2 is huggingface_hub's
        logging.getLogger(library).setLevel(logging.WARNING)
