"""The crew as one of its machines sees it, in a file that `barnraise crew status` reads."""

import time
from collections.abc import Collection
from pathlib import Path

from pydantic import ValidationError

from barnraise.protocol.reports import CrewSeatView
from barnraise.protocol.types import Count, Id, Message, ShortText, UnixTime
from barnraise.training.crew.roster import CrewRoster

STATUS_FILE = "crew.json"
FRESH_SECONDS = 30.0  # an older status is that of a crew that has ended


class SeatStatus(CrewSeatView):
    """One machine of a crew, as another one sees it."""

    name: ShortText


class CrewStatus(Message):
    """A crew as one of its machines sees it, for `barnraise crew status`."""

    run: Id
    number: Count  # this machine's; 0 is the lead
    boundary_bits: Count
    bytes_sent: Count  # of activations, gradients and fragments, since the start
    bytes_received: Count
    seats: list[SeatStatus]
    at: UnixTime


def describe_seats(roster: CrewRoster, connected: Collection[int]) -> list[CrewSeatView]:
    """Describe a crew's machines; `connected` are those with a channel, and this machine."""
    flops = roster.flops_by_key()
    total_flops = sum(flops.values())
    views: list[CrewSeatView] = []
    for number, seat in enumerate(roster.seats):
        view = CrewSeatView(
            key=seat.key[:16],
            first_block=seat.first_block,
            blocks=seat.blocks,
            share=round(flops[seat.key] / total_flops, 4),
            connected=number in connected,
        )
        views.append(view)
    return views


def read_crew_status(folder: Path) -> CrewStatus | None:
    """Return the status that a crew's machine has just written in a run's folder, if it has."""
    try:
        status = CrewStatus.model_validate_json((folder / STATUS_FILE).read_bytes())
    except (OSError, ValidationError):
        return None
    return status if time.time() - status.at < FRESH_SECONDS else None
