"""What each volunteer's machines were sent on request: all once, and a tenth of it again. Pure.

Strangers that request the same updates and blobs again and again would take the uplink from
everybody else. A person may have many keys, so of a volunteer's machines only a few are told apart;
further ones count as the first. What each was sent is in a Bloom filter (Bloom, Communications of
the ACM 13(7), 1970), which is forgotten after a while: a machine that lost its folder is then sent
everything again.
"""

from dataclasses import dataclass, field

from blake3 import blake3

from barnraise.protocol.table_sizes import store_newest


@dataclass(frozen=True)
class RepeatLimits:
    """How much of what a machine was sent on request it may be sent again."""

    forget_seconds: float = 900.0
    share: float = 0.1  # of what it was sent
    bytes: float = float(8 << 20)  # in addition: what was in transit as a connection broke
    volunteers: int = 64  # that are told apart
    machines: int = 4  # of a volunteer, that are told apart
    # After half a million pieces a filter of this size takes one in seven new ones for repeated.
    filter_bytes: int = 1 << 18


REPEAT_LIMITS = RepeatLimits()


@dataclass
class _SentPieces:
    """What one machine was sent."""

    since: float
    allowance: float = REPEAT_LIMITS.bytes  # bytes that it may be sent again
    pieces: bytearray = field(default_factory=lambda: bytearray(REPEAT_LIMITS.filter_bytes))

    def add(self, piece: str) -> bool:
        """Remember a piece; return whether it is new."""
        numbers = memoryview(blake3(piece.encode()).digest()).cast("I")
        bits = [number % (8 * REPEAT_LIMITS.filter_bytes) for number in numbers[:4]]
        is_new = not all(self.pieces[bit >> 3] & 1 << (bit & 7) for bit in bits)
        for bit in bits:
            self.pieces[bit >> 3] |= 1 << (bit & 7)
        return is_new


class ServedPieces:
    """The volunteers whose machines requested something lately."""

    def __init__(self) -> None:
        self._served: dict[str, dict[str, _SentPieces]] = {}  # by volunteer, then by machine

    def try_send(self, volunteer: str, machine: str, piece: str, size: int, now: float) -> bool:
        """Count a piece that a machine of a volunteer requested; return whether it may be sent."""
        machines = self._served.get(volunteer, {})
        store_newest(self._served, volunteer, machines, REPEAT_LIMITS.volunteers)
        if machine not in machines and len(machines) >= REPEAT_LIMITS.machines:
            machine = next(iter(machines))
        served = machines.get(machine)
        if served is None or now >= served.since + REPEAT_LIMITS.forget_seconds:
            served = machines[machine] = _SentPieces(now)
        if served.add(piece):
            served.allowance += REPEAT_LIMITS.share * size
            return True
        if size > served.allowance:
            return False
        served.allowance -= size
        return True
