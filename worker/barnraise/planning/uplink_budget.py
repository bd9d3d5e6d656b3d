"""Which part of a machine's uplink is for what, and how fast that sends its own updates. Pure.

Updates have what UPDATE_SHARE leaves beyond all else that a machine measurably sends. What is sent
about ledgers is limited to STATE_SHARE. The rest of the line is for bursts, and for errors in its
estimate.
"""

import math
from dataclasses import dataclass

from barnraise.planning.lines import Line

UPDATE_SHARE = 0.8  # of the uplink, for updates and all else that is sent
STATE_SHARE = 0.1  # of the uplink, for what peers send each other about their ledgers
HEADER_SHARE = 0.1  # of the updates' share, for the headers of a round's parts
# Of the uplink that updates have at least, however much else there is: where messages and
# acknowledgements fill the rest of the line, rounds get longer, but they do not stop.
MIN_UPDATE_SHARE = 0.1


@dataclass(frozen=True)
class UplinkUse:
    """What a machine's uplink carries.

    Attributes:
        rate: bytes per second of the uplink, without the overhead; inf: not known.
        copies: of each of this machine's updates that it sends itself.
        relayed: bytes per second that it sends of others' updates; inf: not known.
        machines: that train, with this one.
        carrier: bytes per second of the uplink of a peer that passes this machine's updates on to
            all others; inf: there is none.
    """

    rate: float
    copies: float = 1.0
    relayed: float = 0.0
    machines: int = 1
    carrier: float = math.inf

    @property
    def update_rate(self) -> float:
        """Return the bytes per second of updates that this machine can publish.

        min(max((0.8·u − ρ) / c, 0.8·u / max(c, R − 1)), 0.8·v / ((R − 1)·(R − 2)))

        u   bytes per second of the uplink; 0.8·u is what the
            overhead leaves of UPDATE_SHARE of the line          `rate`
        c   copies of each update that this machine sends        `copies`
        ρ   bytes per second of others' updates                  `relayed`
        R   machines; each receives R − 1 updates in a round, so
            none has to send more than R − 1, own and others'    `machines`
        v   bytes per second of the carrier's uplink, which has
            R − 1 machines' updates for R − 2 others each        `carrier`
        """
        others = max(1, self.machines - 1)
        carried = UPDATE_SHARE * self.carrier / (others * max(1, others - 1))
        copies, usable = max(1.0, self.copies), UPDATE_SHARE * self.rate
        left = usable / max(copies, others)
        if self.relayed < usable:
            left = max(left, (usable - self.relayed) / copies)
        return min(left, carried)


def alike_uplink(line: Line, machines: int, carrier_bytes: float = math.inf) -> UplinkUse:
    """Return how the lines of alike machines are used; the slower way of each counts.

    `carrier_bytes` are those per second of a further member's line that carries for them.

    On average each machine sends R − 1 copies: of its own updates, or of others' in return. A
    member with a fast line, if there is one, sends them instead. Each line receives what R − 1
    others publish.
    """
    if math.isinf(carrier_bytes):
        rate = min(line.up_bytes, line.down_bytes)
        return UplinkUse(rate, max(1, machines - 1), machines=machines)
    rate = min(line.up_bytes, line.down_bytes / max(1, machines - 1))
    return UplinkUse(rate, machines=machines, carrier=carrier_bytes)
