"""Decide which newcomers a machine compares, however many there are. Pure.

Each comparison costs the bytes of an update, so only a few newcomers are compared at a time, for a
few of this machine's rounds. Then another one's turn comes, if one waits.
"""

from collections.abc import Collection
from dataclasses import dataclass

from barnraise.planning.round_limits import MAX_PARTS, PACE_MARGIN, TRIAL_ROUNDS, TRIAL_SEATS


@dataclass
class _Seat:
    """A newcomer that is compared now."""

    rounds_left: float = TRIAL_ROUNDS  # of this machine
    credit: float = PACE_MARGIN  # rounds of the newcomer that may be fetched


class TrialSeats:
    """The newcomers' volunteers that are compared, and those that wait."""

    def __init__(self) -> None:
        self._seats: dict[str, _Seat] = {}  # by volunteer
        self._waiting: dict[str, None] = {}  # volunteers, the first one at the front

    def on_own_round(self, fraction: float) -> None:
        """Record that this machine has published a part of a round, in (0, 1]."""
        for volunteer, seat in [*self._seats.items()]:
            seat.rounds_left -= fraction
            seat.credit = min(2 * PACE_MARGIN, seat.credit + PACE_MARGIN * fraction)
            if seat.rounds_left <= 0:
                del self._seats[volunteer]
                self._waiting[volunteer] = None

    def accepts(self, volunteer: str, fraction: float, linked: Collection[str]) -> bool:
        """Return whether to compare a newcomer's trial, and count it.

        It changes a fraction of the model's fragments. Newcomers that are not linked lose their
        place.
        """
        self._seats = {name: seat for name, seat in self._seats.items() if name in linked}
        self._waiting = {name: None for name in self._waiting if name in linked}
        if volunteer not in self._seats:
            self._waiting.setdefault(volunteer, None)
            free = max(0, TRIAL_SEATS - len(self._seats))
            if volunteer not in [*self._waiting][:free]:
                return False
            del self._waiting[volunteer]
            self._seats[volunteer] = _Seat()
        seat = self._seats[volunteer]
        cost = max(fraction, 1 / MAX_PARTS)
        if seat.credit < cost:
            return False
        seat.credit -= cost
        return True
