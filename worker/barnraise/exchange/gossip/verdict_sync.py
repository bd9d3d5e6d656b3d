"""Whether those we are linked to take the same updates out as we do, and hold the same ones under the same numbers: a
pure state machine beside gossip, which sees numbers alone.

Whose verdicts have another digest is told all of ours, now and then, until it says that it has them. It does the same,
so that both end with the union. Where vector and verdicts are equal and the headers behind them are not, somebody
forked: each shows the other its authors' last headers, and whoever sees two with one number has the proof.
"""

import math
from dataclasses import dataclass

from barnraise.protocol.messages import PeerState

AGAIN = 10.0  # seconds after which one that does not know our verdicts yet is told them again
SHOWN = 3.0  # …and after which headers are compared again
TWICE = 2  # States in a row that must differ: an update that is just coming in may be in one digest and not the other


@dataclass(frozen=True)
class TellVerdicts:
    to: str


@dataclass(frozen=True)
class ShowHeads:
    to: str


@dataclass
class Said:
    """What a linked peer last said."""

    verdicts: str | None = None
    tell_at: float = -math.inf  # when it may be told ours (again)
    apart: int = 0  # how often in a row its headers were others than ours
    show_at: float = -math.inf


class Accord:
    def __init__(self, verdicts: str | None):
        self._verdicts = verdicts  # the digest of ours
        self._said: dict[str, Said] = {}

    def told(self, key: str, state: PeerState, same: bool, heads: str) -> None:
        """A peer's State. `same`: its vector is ours; `heads`: our headers' digest."""
        said = self._said.setdefault(key, Said())
        said.verdicts = state.verdicts_digest
        apart = (
            same
            and state.verdicts_digest == self._verdicts
            and state.heads_digest not in (None, heads)
        )
        said.apart = said.apart + 1 if apart else 0

    def ruled(self, verdicts: str | None) -> None:
        """Ours are others now: whoever lacks them hears of it at once."""
        self._verdicts = verdicts
        for said in self._said.values():
            said.tell_at = -math.inf

    def left(self, key: str) -> None:
        self._said.pop(key, None)

    def agrees(self, key: str) -> bool:
        """Whether this peer takes the same updates out as we do."""
        return key in self._said and self._said[key].verdicts == self._verdicts

    def act(self, now: float) -> list[TellVerdicts | ShowHeads]:
        actions: list[TellVerdicts | ShowHeads] = []
        for key, said in self._said.items():
            if (
                self._verdicts is not None
                and said.verdicts != self._verdicts
                and now >= said.tell_at
            ):
                said.tell_at = now + AGAIN
                actions.append(TellVerdicts(key))
            if said.apart >= TWICE and now >= said.show_at:
                said.show_at = now + SHOWN
                actions.append(ShowHeads(key))
        return actions
