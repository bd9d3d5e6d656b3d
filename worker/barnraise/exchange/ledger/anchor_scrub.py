"""Each fragment of the anchor against its ledger, one at a time between steps, and what a damaged one must be.

A fragment's sketch must be that of its beginning (the run's first weights, or the cut this machine began at) plus
those that the headers state of what was put in, less what verdicts took out. Else memory or disk has changed it: it is
made anew from the beginning and the payloads, where these are few and all here, or else taken from peers at the
same vector and verdicts; either way it must have the right sketch. Called from the worker's own thread.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from barnraise.errors import DamageError
from barnraise.exchange.compression.codec import decode
from barnraise.exchange.ledger.anchor import Anchor, fragment_from_bytes, load_initial_fragment
from barnraise.exchange.ledger.diff import updates_between
from barnraise.exchange.ledger.ledger import Ledger
from barnraise.spec import RunSpec

log = logging.getLogger("barnraise.exchange")

MIN_INTERVAL = 2.0  # seconds between two fragments, at least…
TIME_SHARE = 0.005  # …and so that looking takes no more of the time
MAX_LOCAL_UPDATES = 1000  # updates that are added up again here before peers are asked


@dataclass
class ScrubFindings:
    """What became of looking, since this process began."""

    checked: int = 0  # fragments
    corrupted: int = 0  # …that were damaged
    repaired: int = 0  # …and are whole again
    damaged: str | None = None  # the one that is not


class AnchorScrub:
    def __init__(self, spec: RunSpec, ledger: Ledger):
        self._fragments, self._spec, self._ledger = spec.model.fragments(), spec, ledger
        self.findings = ScrubFindings()
        self._next, self._at = 0, 0.0  # which fragment, and when (monotonic seconds)

    def check_next(self, anchor: Anchor) -> int | None:
        """The fragment that is damaged, of the one whose turn it is; None when it is sound or none is due. A damaged
        one stays due."""
        began = time.monotonic()
        if anchor.expected_sketches is None or began < self._at or not len(anchor.fragments):
            return None
        index, findings = self._next % len(anchor.fragments), self.findings
        name = self._fragments[index].name
        sound = _sound(anchor, index)
        if not sound:
            if findings.damaged is None:
                findings.corrupted, findings.damaged = findings.corrupted + 1, name
                log.error("the anchor's %s is not what its ledger adds up to: repairing it", name)
            return index
        if findings.damaged is not None:
            findings.repaired, findings.damaged = findings.repaired + 1, None
            log.warning("the anchor's %s is whole again", name)
        findings.checked += 1
        self._next, now = index + 1, time.monotonic()
        self._at = now + max(MIN_INTERVAL, (now - began) / TIME_SHARE)
        return None

    def rebuild_fragment(
        self, anchor: Anchor, index: int, ask: Callable[[], torch.Tensor | None]
    ) -> torch.Tensor | None:
        """int32 [n] that fragment `index` must be; None when neither the ledger nor `ask`, which asks the peers, gives
        what has its sketch."""
        for make in (
            lambda: self._added_up(anchor, index, MAX_LOCAL_UPDATES),
            ask,
            lambda: self._added_up(anchor, index),
        ):
            units = make()
            if (
                units is not None
                and units.numel() == self._fragments[index].size
                and anchor.is_intact(index, units)
            ):
                return units
        return None

    def _added_up(self, anchor: Anchor, index: int, most: int | None = None) -> torch.Tensor | None:
        """The fragment from its beginning and the payloads; None when they are more than `most`, or not all here."""
        ledger, blobs = self._ledger, self._ledger.blobs
        if (base := ledger.base_snapshot()) is None and ledger.base_heads():
            return None  # its beginning was let go
        start = {update.author: update.seq for _, update in base[0]} if base else {}
        if most is not None and sum(anchor.vector.values()) - sum(start.values()) > most:
            return None
        way = updates_between(
            ledger, start, ledger.base_retracted(), anchor.vector, anchor.retracted
        )
        if way is None or not all(blobs.has(update.fragments[index].digest) for update, _ in way):
            return None
        if base is None:
            if (units := load_initial_fragment(self._spec, index, blobs)) is None:
                return None
        elif (data := blobs.read_verified(base[1][index])) is not None:
            units = fragment_from_bytes(data)
        else:
            return None
        for update, times in way:
            part = update.fragments[index]
            if not part.size:
                continue
            if (payload := blobs.read_verified(part.digest)) is None:
                return None
            units.add_(decode(payload, units.numel()), alpha=times)
        return units


def _sound(anchor: Anchor, index: int) -> bool:
    try:
        return anchor.is_intact(index)
    except DamageError as error:  # a state on disk knows by itself
        log.error("%s", error)
        return False
