"""Verify the anchor against the ledger, one fragment at a time, and rebuild damaged fragments.

A fragment's sketch must equal that of its start (the run's initial weights, or the snapshot with
which this machine joined), plus the sketches that the headers state of what was added, minus those
of what verdicts retracted. Otherwise memory or disk has changed it. Then it is computed again from
its start and the payloads, if they are few and here, or requested from peers at the same version
vector and verdicts. Either way the result must have the right sketch.

The training thread calls this between steps.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from barnraise.errors import DamageError
from barnraise.ledger.anchor import Anchor, fragment_from_bytes, load_initial_fragment
from barnraise.ledger.anchor_diff import updates_between
from barnraise.ledger.codec import decode
from barnraise.ledger.ledger import Ledger
from barnraise.ledger.scrub_pace import ScrubPace
from barnraise.spec import RunSpec

log = logging.getLogger("barnraise.exchange")

FRAGMENT_PACE = ScrubPace(2.0)
MAX_LOCAL_UPDATES = 1000  # up to which a fragment is recomputed here before peers are asked


@dataclass
class ScrubFindings:
    """What verifying has found since this process started."""

    checked: int = 0  # fragments that were intact
    corrupted: int = 0  # fragments that were damaged
    repaired: int = 0  # damaged fragments that were repaired
    # Name of the fragment that is damaged now; None if there is none.
    damaged: str | None = None


class AnchorScrub:
    """Verifies the anchor's fragments in turn."""

    def __init__(self, spec: RunSpec, ledger: Ledger) -> None:
        self._fragments = spec.model.fragments()
        self._spec = spec
        self._ledger = ledger
        self.findings = ScrubFindings()
        self._next_index = 0
        self._next_at = 0.0  # monotonic seconds

    def check_next(self, anchor: Anchor) -> int | None:
        """Verify the next fragment if one is due.

        A damaged fragment stays due until it is repaired.

        Returns:
            The fragment's index if it is damaged; None if it is intact or none is due.
        """
        started_at = time.monotonic()
        if anchor.expected_sketches is None or started_at < self._next_at:
            return None
        if not len(anchor.fragments):
            return None
        index = self._next_index % len(anchor.fragments)
        name = self._fragments[index].name
        findings = self.findings
        if not _is_intact(anchor, index):
            if findings.damaged is None:
                findings.corrupted += 1
                findings.damaged = name
                log.error("the anchor's %s is not what its ledger adds up to: repairing it", name)
            return index
        if findings.damaged is not None:
            findings.repaired += 1
            findings.damaged = None
            log.warning("the anchor's %s is whole again", name)
        findings.checked += 1
        self._next_index = index + 1
        now = time.monotonic()
        self._next_at = now + FRAGMENT_PACE.pause_seconds(now - started_at)
        return None

    def rebuild_fragment(
        self, anchor: Anchor, index: int, request: Callable[[], torch.Tensor | None]
    ) -> torch.Tensor | None:
        """Rebuild a damaged fragment from the ledger, or as `request` brings it from peers.

        Returns:
            int32[n] with the right sketch; None if neither source has it.
        """
        sources: tuple[Callable[[], torch.Tensor | None], ...] = (
            lambda: self._recompute(anchor, index, MAX_LOCAL_UPDATES),
            request,
            lambda: self._recompute(anchor, index),
        )
        for source in sources:
            units = source()
            if units is None or units.numel() != self._fragments[index].size:
                continue
            if anchor.is_intact(index, units):
                return units
        return None

    def _recompute(
        self, anchor: Anchor, index: int, max_updates: int | None = None
    ) -> torch.Tensor | None:
        """Add up a fragment from its start and the payloads.

        Returns:
            int32[n]; None if there are more than `max_updates`, or not everything is here.
        """
        ledger = self._ledger
        blobs = ledger.blobs
        base = ledger.base.snapshot()
        if base is None and ledger.base.heads():
            return None  # its start has been pruned
        start = {update.author: update.seq for _, update in base[0]} if base else {}
        update_count = sum(anchor.vector.values()) - sum(start.values())
        if max_updates is not None and update_count > max_updates:
            return None
        updates = updates_between(
            ledger, start, ledger.base.retracted(), anchor.vector, anchor.retracted
        )
        if updates is None:
            return None
        if not all(blobs.has(update.fragments[index].digest) for update, _ in updates):
            return None
        units = self._load_start(index, None if base is None else base[1][index])
        if units is None:
            return None
        for update, multiplier in updates:
            part = update.fragments[index]
            if not part.size:
                continue
            payload = blobs.read_verified(part.digest)
            if payload is None:
                return None
            units.add_(decode(payload, units.numel()), alpha=multiplier)
        return units

    def _load_start(self, index: int, digest: str | None) -> torch.Tensor | None:
        """Return int32[n] of a fragment's start: the base's blob, or the run's initial weights."""
        if digest is None:
            return load_initial_fragment(self._spec, index, self._ledger.blobs)
        data = self._ledger.blobs.read_verified(digest)
        return None if data is None else fragment_from_bytes(data)


def _is_intact(anchor: Anchor, index: int) -> bool:
    """Return whether a fragment is intact; a state on disk may raise DamageError by itself."""
    try:
        return anchor.is_intact(index)
    except DamageError as error:
        log.error("%s", error)
        return False
