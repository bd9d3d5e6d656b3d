"""Compare newcomers' trials with this machine's own updates. Runs on the exchange's event loop.

What a trial changes is fetched, sampled and deleted again. It enters neither ledger nor anchor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from barnraise.errors import MessageError
from barnraise.exchange.blobs.blob_fetcher import BlobFetcher, WantedBlob
from barnraise.exchange.gossip.handler_context import HandlerContext
from barnraise.exchange.snapshots.snapshot_client import MIN_FETCH_RATE, MIN_FETCH_SECONDS
from barnraise.exchange.trials.trial_seats import TrialSeats
from barnraise.ledger.update_queue import Samples
from barnraise.ledger.validation import decode_parts, validate_parts
from barnraise.peering.links.connection import Connection
from barnraise.peering.links.received import MessageHandlers, Received
from barnraise.protocol.enums import Standing
from barnraise.protocol.trials import TrialUpdate


@dataclass(frozen=True)
class ComparedTrial:
    """The elements by which a trial is judged."""

    volunteer: str  # digest of the newcomer's volunteer
    samples: Samples
    tokens: int  # that the trial states


@dataclass(frozen=True)
class TrialParts:
    """What trials are compared with."""

    sizes: Sequence[int]  # elements of each fragment
    # Returns the elements of a fragment's units by which an update is judged, in any thread.
    sample: Callable[[int, torch.Tensor], torch.Tensor]
    on_compared: Callable[[ComparedTrial], None]


class TrialReceiver:
    """Fetch the trials of a few newcomers at a time, if this machine's word counts."""

    def __init__(self, context: HandlerContext, fetcher: BlobFetcher, parts: TrialParts) -> None:
        self._ledger = context.ledger
        self._volunteer = context.gossip.volunteer
        self._connections = context.connections
        self._run_on_disk = context.run_on_disk
        self._spawn = context.spawn
        self._disconnect = context.disconnect
        self._fetcher = fetcher
        self._parts = parts
        self._seats = TrialSeats()
        self._compared_now: set[str] = set()  # volunteers whose trials are being fetched
        # Before it has the whole text, a trial could name a blob of that, to have it deleted.
        self._has_published = False

    def message_handlers(self) -> MessageHandlers:
        """Return what receives each type of message."""
        return {TrialUpdate: self.on_trial}

    def on_own_round(self, fraction: float) -> None:
        """Record that this machine has published a part of a round, in (0, 1]."""
        self._has_published = True
        self._seats.on_own_round(fraction)

    def on_trial(self, received: Received[TrialUpdate]) -> None:
        """Receive a newcomer's trial.

        Raises:
            MessageError: When no newcomer could publish it.
        """
        connection, trial = received.connection, received.message
        validate_parts(trial.fragments, f"a trial of {received.key[:8]}", self._parts.sizes)
        volunteer = connection.ticket.volunteer
        if not self._is_on_trial(connection) or volunteer in self._compared_now:
            return
        linked = {c.ticket.volunteer for c in self._connections.values() if self._is_on_trial(c)}
        fraction = len(trial.payload_parts) / len(trial.fragments)
        if not self._seats.accepts(volunteer, fraction, linked):
            return
        blobs = self._ledger.blobs
        if not any(blobs.has(part.digest) for part in trial.payload_parts):  # else it is a copy
            self._compared_now.add(volunteer)
            self._spawn(self._compare(received.key, volunteer, trial))

    def _is_on_trial(self, connection: Connection) -> bool:
        """Return whether this machine's word counts, and it counts for this peer."""
        verdicts, volunteer = self._ledger.verdicts, connection.ticket.volunteer
        return (
            self._has_published
            and verdicts.may_attest(self._volunteer)
            and connection.ticket.standing is Standing.NEWCOMER
            and not verdicts.admits(volunteer)
            and volunteer not in verdicts.suspended
        )

    async def _compare(self, key: str, volunteer: str, trial: TrialUpdate) -> None:
        blobs, retention = self._ledger.blobs, self._ledger.retention
        sizes = {part.digest: part.size for part in trial.payload_parts}
        blobs.pin(sizes)
        try:
            await self._run_on_disk(retention.expect_files, sizes)
            wanted = [WantedBlob(digest, size, size) for digest, size in sizes.items()]
            holders = {digest: (key,) for digest in sizes}
            fetcher = self._fetcher
            if await fetcher.fetch(wanted, MIN_FETCH_SECONDS, MIN_FETCH_RATE, holders):
                _, samples = await self._run_on_disk(
                    decode_parts, trial.fragments, self._parts.sizes, blobs.read, self._parts.sample
                )
                self._parts.on_compared(ComparedTrial(volunteer, samples, trial.tokens))
        except MessageError as error:
            self._disconnect(key, str(error))
        finally:
            self._compared_now.discard(volunteer)
            blobs.unpin(sizes)
            await self._run_on_disk(retention.delete_files)
