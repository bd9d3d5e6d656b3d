"""Publish a round's update, one fragment after the other."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from blake3 import blake3

from barnraise.ledger.anchor import Withdrawal, compute_sketch
from barnraise.ledger.blob_store import BlobStore
from barnraise.ledger.local_author import LocalAuthor
from barnraise.ledger.validation import EMPTY_PART
from barnraise.protocol.messages import FragmentUpdate, Update

# Small payloads take the disk's latency, not its bandwidth: several are stored at a time, while the
# next fragment is encoded, as long as they hold so few bytes together.
STORE_THREADS = 4
MAX_PENDING_BYTES = 1 << 20


class UpdateWriter:
    """Write an update's payloads, then publish it when the `with` block ends.

    Payload files are durable first, then the ledger's row; only then is the first byte sent. If the
    block or the disk raises an exception, nothing is published. Nor is it where the update would
    not count: then `withdrawal` says what the anchor must be without, and its payloads stay pinned.

        with exchange.new_update(tokens) as update:
            for part in engine.end_round(...):
                update.add(part.fragment, part.payload, part.units)
                del part  # frees the fragment before the next one is computed
        if update.withdrawal is None:
            anchor.record(update.header)
    """

    def __init__(
        self,
        author: LocalAuthor,
        blobs: BlobStore,
        fragment_count: int,
        tokens: int,
        on_published: Callable[[Update], None],
        on_added: Callable[[int, torch.Tensor], None] = lambda fragment, units: None,
    ) -> None:
        """Begin an update, which has trained on `tokens`.

        `on_added` receives index and units of each part, `on_published` the header once it is in
        the ledger.
        """
        self._author = author
        self._blobs = blobs
        self._fragment_count = fragment_count
        self._tokens = tokens
        self._on_published = on_published
        self._on_added = on_added
        self._parts: list[FragmentUpdate] = []
        self._header: Update | None = None
        self.withdrawal: Withdrawal | None = None  # of an update that would not count
        self._disk_threads = ThreadPoolExecutor(STORE_THREADS, "barnraise-payloads")
        self._pending: list[Future[str]] = []  # payloads that are being stored
        self._pending_bytes = 0

    @property
    def header(self) -> Update:
        """The published header; available once the `with` block has ended."""
        assert self._header is not None, "it is published when the with block ends, if it counts"
        return self._header

    def add(self, fragment: int, payload: bytes, units: torch.Tensor) -> None:
        """Add a fragment's part. No reference to it is kept, once its payload is on the disk.

        Fragments come in ascending order; the update does not change those that are left out.

        Args:
            fragment: The fragment's index.
            payload: The encoded part.
            units: int32 [size], what the payload decodes to.

        Raises:
            OSError: When the disk refuses the payload.
        """
        self._skip_to(fragment)
        self._on_added(fragment, units)
        digest = blake3(payload).hexdigest()
        self._blobs.pin([digest])  # until the ledger names it
        part = FragmentUpdate(digest=digest, size=len(payload), sketch=compute_sketch(units))
        self._parts.append(part)
        if self._pending_bytes + len(payload) > MAX_PENDING_BYTES:
            self._wait_until_stored()
        self._pending_bytes += len(payload)
        self._pending.append(self._disk_threads.submit(self._blobs.store, payload))
        if len(payload) > MAX_PENDING_BYTES:
            self._wait_until_stored()

    def _wait_until_stored(self) -> None:
        """Wait until all payloads so far are on the disk.

        Raises:
            OSError: The disk has refused one.
        """
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        for future in pending:
            future.result()

    def _skip_to(self, fragment: int) -> None:
        """Add empty parts for the fragments before `fragment`."""
        assert len(self._parts) <= fragment <= self._fragment_count, "fragments must ascend"
        self._parts += [EMPTY_PART] * (fragment - len(self._parts))

    def __enter__(self) -> "UpdateWriter":
        return self

    def __exit__(self, error_type: type[BaseException] | None, *error: object) -> None:
        try:
            if error_type is None:
                self._skip_to(self._fragment_count)
                self._wait_until_stored()
                self._header = self._author.append_update(self._parts, self._tokens)
                if self._header is None:
                    self.withdrawal = Withdrawal(self._parts, self._tokens)
        finally:
            self._disk_threads.shutdown()  # waits for writes that an exception has left
            if self.withdrawal is None:
                self._blobs.unpin(part.digest for part in self._parts if part.size)
        if self._header is not None:
            self._on_published(self._header)
