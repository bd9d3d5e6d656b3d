"""Compose a worker's status for a terminal: six lines that fit 60 columns, or one line for a log.

Pure: the width is an argument.
"""

from collections.abc import Sequence

from rich.cells import cell_len
from rich.text import Text

from barnraise.formats import (
    format_amount,
    format_byte_rate,
    format_count,
    format_duration,
    format_share,
)
from barnraise.protocol.enums import Activity
from barnraise.training.local_status import LocalStatus

LABEL_WIDTH = 11
MIN_BAR = 6  # columns of a progress bar; less shows nothing
BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*%#"
BUSY = ("training", "finishing", "finished")
STOPPED = "stopped"  # what a panel shows of a worker that ended before its run
SEPARATOR = " · "


def build_panel(
    status: LocalStatus,
    limits: str,
    keys: str,
    width: int,
    is_ascii: bool = False,
    is_running: bool = True,
) -> Text:
    """Compose the six lines of a worker's status, for a terminal of `width` columns.

    The limits are described in a few words, as are the keys that do something now. Of a worker that
    does not run, nothing of now is shown.
    """
    if not is_running:
        status = _without_movement(status)
    is_stopped = not is_running and status.activity is not Activity.FINISHED
    activity = STOPPED if is_stopped else status.activity
    lines = [
        _build_headline(status, activity, width, is_ascii),
        _label_value("Loss", _describe_loss(status, width - LABEL_WIDTH, is_ascii)),
        _label_value("Speed", _describe_speed(status, width - LABEL_WIDTH)),
        _label_value("Time left", _describe_time_left(status)),
        _label_value("Peers", _describe_link(status, width - LABEL_WIDTH, is_ascii)),
        _last_line(status, limits, keys, width),
    ]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Text("\n", no_wrap=True, end="").join(lines)


def format_status_line(status: LocalStatus) -> str:
    """Compose one line for a log: activity, step, loss, speed, peers, what is wrong."""
    parts = [
        str(status.activity),
        f"step {status.step:,}",
        f"loss {_format_loss(status)}",
        f"{status.rate:,.0f} tokens/s",
        f"{format_share(_share_done(status))} of the run",
        format_amount(status.peers, "peer"),
    ]
    reason = _describe_waiting(status) or status.warning
    return ", ".join(parts) + (f" ({reason})" if reason else "")


def draw_sparkline(values: Sequence[float], width: int, is_ascii: bool = False) -> str:
    """Draw values as blocks of eight heights, at most `width` of them."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    means = []
    for index in range(count):
        part = values[index * len(values) // count : (index + 1) * len(values) // count]
        means.append(sum(part) / len(part))
    low, high = min(means), max(means)
    blocks = ASCII_BLOCKS if is_ascii else BLOCKS
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((mean - low) * scale)] for mean in means)


def _without_movement(status: LocalStatus) -> LocalStatus:
    """Return the status of a worker that does not run: what it did, and nothing of now."""
    nothing = {"rate": 0.0, "run_rate": None, "peers": 0, "exchange": None}
    return status.model_copy(update=nothing | {"reason": "", "warning": "", "waiting": None})


def _build_headline(status: LocalStatus, activity: str, width: int, is_ascii: bool) -> Text:
    """Return the run's name, what the worker does, and how far the run is, with a bar."""
    share = _share_done(status)
    percent = format_share(share)
    line = Text.assemble(
        (status.name, "bold"),
        "  ",
        (activity, "green" if activity in BUSY else "yellow"),
        "  ",
    )
    room = width - cell_len(line.plain) - len(percent) - 1
    if room < MIN_BAR:
        line.truncate(max(1, width - len(percent) - 2), overflow="ellipsis")
        line.append("  ")
        room = 0
    full = round(share * room)
    line.append(("#" if is_ascii else "━") * full, "cyan")
    line.append(("-" if is_ascii else "─") * (room - full), "dim")
    line.append(" " * bool(room))
    line.append(percent, "cyan")
    return line


def _label_value(label: str, value: Text | str) -> Text:
    return Text.assemble((f"{label:<{LABEL_WIDTH}}", "dim"), value)


def _describe_loss(status: LocalStatus, width: int, is_ascii: bool) -> Text:
    text = Text(_format_loss(status), "bold")
    validation = status.validation_last
    ending = f"  validation {validation[1]:.3f}" if validation else ""
    room = width - len(text.plain) - len(ending) - 2
    drawn = draw_sparkline(status.losses, min(room, 40), is_ascii)
    if drawn:
        text.append("  ").append(drawn, "cyan")
    text.append(ending)
    return text


def _format_loss(status: LocalStatus) -> str:
    return f"{status.loss:.3f}" if status.loss is not None else "–"


def _describe_speed(status: LocalStatus, width: int) -> str:
    """Return this machine's tokens per second, and its share of all that was trained."""
    rate = f"{status.rate:,.0f} tokens/s"
    own, everybody = status.tokens, status.ledger_tokens
    if not own:
        return rate
    share = format_share(own / max(1, everybody))
    return _first_that_fits(
        width,
        f"{rate} · {format_count(own)} tokens by this machine, {share} of the run's",
        f"{rate} · {format_count(own)} tokens, {share} of the run's",
        f"{rate} · {share} of the run",
    )


def _describe_time_left(status: LocalStatus) -> str:
    budget, done = status.token_budget, status.ledger_tokens
    progress = f"{format_count(min(done, budget))} of {format_count(budget)} tokens"
    rate = status.run_rate or status.rate
    if done >= budget:
        left = "none"
    elif rate:
        left = f"about {format_duration((budget - done) / rate)}"
    else:
        left = "–"
    return left + SEPARATOR + progress


def _describe_link(status: LocalStatus, width: int, is_ascii: bool) -> str:
    """Return the peers, the traffic with them, and the updates that went each way."""
    peers = str(status.peers)
    sent, received = status.updates_sent, status.updates_received
    updates = f"{format_amount(sent, 'update')} sent, {received:,} received"
    short = f"{sent:,} sent, {received:,} received"
    exchange = status.exchange
    if not exchange:
        return SEPARATOR.join([peers, updates])
    up, down = format_byte_rate(exchange.sent_rate), format_byte_rate(exchange.received_rate)
    rates = f"{up} up, {down} down"
    arrows = rates if is_ascii else f"↑{up} ↓{down}"
    behind = [f"{exchange.lag:,} behind"] if exchange.lag else []
    return _first_that_fits(
        width,
        SEPARATOR.join([peers, rates, updates, *behind]),
        SEPARATOR.join([peers, rates, short, *behind]),
        SEPARATOR.join([peers, arrows, short]),
        SEPARATOR.join([peers, arrows]),
    )


def _first_that_fits(width: int, *variants: str) -> str:
    """Return the first variant that has at most `width` columns, or else the last one."""
    return next((text for text in variants if cell_len(text) <= width), variants[-1])


def _describe_waiting(status: LocalStatus) -> str:
    """Return why a worker waits; "" while it does not."""
    return status.refused or status.reason or status.waiting or ""


def _last_line(status: LocalStatus, limits: str, keys: str, width: int) -> Text:
    """Return why the worker waits, what is wrong or what it may use; the keys at the right edge.

    A reason that needs the whole line gets it: the keys were shown before.
    """
    room = width - cell_len(keys) - (2 if keys else 0)
    if reason := _describe_waiting(status):
        line = _label_value("Waiting", Text(reason, "yellow"))
    elif warning := status.warning:
        line = _label_value("Warning", Text(warning, "yellow"))
    else:
        line = _label_value("Limits", limits or "none")
        line.truncate(max(room, LABEL_WIDTH), overflow="ellipsis")
    if keys and LABEL_WIDTH < room >= cell_len(line.plain):
        line.append(" " * (width - cell_len(line.plain) - cell_len(keys)))
        line.append(keys, "dim")
    return line


def _share_done(status: LocalStatus) -> float:
    return min(1.0, status.ledger_tokens / max(1, status.token_budget))
