"""Share the disk that incomplete updates may take among the volunteers who send them. Pure.

A header costs its author nothing, and reserves the bytes of all its payloads on every peer's disk
until they are complete. The reservations have a bound in all and for each volunteer. When all is
taken, the volunteer with the largest reservation makes room for one with a smaller one.
"""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)

VOLUNTEER_SHARE = 0.25  # of the bytes in all that one volunteer may reserve
STALE_SECONDS = 60.0  # without a byte after which an update makes room for others
EXPIRY_SECONDS = 600.0  # without a byte after which an incomplete update is dropped
MIN_BYTES_PER_SECOND = 2048.0  # an update that arrives more slowly than this is dropped in the end


@dataclass
class Reservation:
    """What an incomplete update reserves."""

    volunteer: str  # digest of its author's volunteer
    size: int  # bytes of its payloads
    reserved_at: float  # when its header arrived, in seconds
    progress_at: float  # when its last byte arrived

    def is_expired(self, now: float) -> bool:
        """Return whether its bytes have not arrived in time."""
        longest = EXPIRY_SECONDS + self.size / MIN_BYTES_PER_SECOND
        return now > self.progress_at + EXPIRY_SECONDS or now > self.reserved_at + longest


@dataclass(frozen=True)
class ReservedTotal:
    """The bytes and the number of some reservations."""

    size: int = 0
    count: int = 0

    def plus(self, size: int) -> "ReservedTotal":
        """Return the total with one more reservation."""
        return ReservedTotal(self.size + size, self.count + 1)

    def exceeds(self, limit: "ReservedTotal") -> bool:
        """Return whether it is above a limit; a single reservation never is."""
        return self.count > 1 and (self.size > limit.size or self.count > limit.count)


class TransferBudget(Generic[Name]):
    """The reservations of all incomplete updates, in order of arrival."""

    def __init__(self, limit: ReservedTotal, volunteer_count: int) -> None:
        """Limit the reservations.

        Args:
            limit: What all may reserve; a single update always fits.
            volunteer_count: How many updates of one volunteer may have reservations.
        """
        self._limit = limit
        self._volunteer_limit = ReservedTotal(int(VOLUNTEER_SHARE * limit.size), volunteer_count)
        self._reservations: dict[Name, Reservation] = {}

    def __len__(self) -> int:
        return len(self._reservations)

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes of all reservations."""
        return sum(reservation.size for reservation in self._reservations.values())

    def reserve(self, name: Name, volunteer: str, size: int, now: float) -> list[Name] | None:
        """Reserve room for an update.

        Args:
            name: Identifies the update.
            volunteer: Digest of its author's volunteer.
            size: Bytes of its payloads.
            now: The time in seconds.

        Returns:
            The updates to drop for it, whose reservations have ended; None when there is no room.
        """
        remaining = dict(self._reservations)
        dropped: list[Name] = []
        while True:
            totals = _sum_by_volunteer(remaining)
            mine = totals.get(volunteer, ReservedTotal()).plus(size)
            everything = ReservedTotal(
                sum(total.size for total in totals.values()) + size, len(remaining) + 1
            )
            if mine.exceeds(self._volunteer_limit):
                victim = _find_stalest(remaining, now, volunteer, STALE_SECONDS)
            elif everything.exceeds(self._limit):
                most = max(totals, key=lambda other: (totals[other].size, totals[other].count))
                has_more = totals[most].size > mine.size or (
                    totals[most].size == mine.size and totals[most].count > mine.count
                )
                if has_more:
                    victim = _find_stalest(remaining, now, most, -math.inf)
                else:
                    victim = _find_stalest(remaining, now, None, STALE_SECONDS)
            else:
                break
            if victim is None:
                return None
            del remaining[victim]
            dropped.append(victim)
        remaining[name] = Reservation(volunteer, size, now, now)
        self._reservations = remaining
        return dropped

    def record_progress(self, name: Name, now: float) -> None:
        """Record that bytes of an update arrived."""
        if reservation := self._reservations.get(name):
            reservation.progress_at = now

    def release(self, name: Name) -> None:
        """End the reservation of an update that is complete or dropped."""
        self._reservations.pop(name, None)

    def expired(self, now: float) -> list[Name]:
        """Return the updates whose bytes have not arrived in time."""
        return [
            name for name, reservation in self._reservations.items() if reservation.is_expired(now)
        ]


def _sum_by_volunteer(reservations: Mapping[Name, Reservation]) -> dict[str, ReservedTotal]:
    """Return what each volunteer has reserved."""
    totals: dict[str, ReservedTotal] = {}
    for reservation in reservations.values():
        before = totals.get(reservation.volunteer, ReservedTotal())
        totals[reservation.volunteer] = before.plus(reservation.size)
    return totals


def _find_stalest(
    reservations: Mapping[Name, Reservation],
    now: float,
    volunteer: str | None,
    longest: float,
) -> Name | None:
    """Return the update, of a volunteer or of all, that has had no byte for the longest time.

    None if no update has had none for more than `longest` seconds.
    """
    idle = [
        (now - reservation.progress_at, index, name)
        for index, (name, reservation) in enumerate(reservations.items())
        if volunteer in (None, reservation.volunteer) and now - reservation.progress_at > longest
    ]
    return max(idle, key=lambda entry: (entry[0], -entry[1]))[2] if idle else None
