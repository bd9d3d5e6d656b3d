"""Notice ranks that die or hang, outside the collectives, which would wait for them for ever.

Each rank counts in torch's key-value store (`TCPStore`) from a thread of its own. Rank 0 watches
all others, and these watch rank 0.
"""

import os
import threading
import time

from barnraise.swap.sharded.key_value_store import StoreAddress, first_line

BEAT_SECONDS = 2.0
MISSED_BEATS = 5  # of a rank that is lost; with two more beats, it is found within 15 s
DEAD_SECONDS = MISSED_BEATS * BEAT_SECONDS
POLL_SECONDS = 0.1  # at which a caller looks for a failure
STORE_SECONDS = 5.0  # for one request to the store
LOST_RANK_CODE = 3  # the exit code of a rank whose group has ended


class Heartbeat:
    """One rank's beats, and its watch over the others.

    Attributes:
        failure: a sentence about the first rank that was lost; "" while all live.
    """

    def __init__(self, address: StoreAddress, rank: int, ranks: int) -> None:
        """Begin to beat and to watch as one of so many ranks."""
        self.failure = ""
        self._store = address.connect(STORE_SECONDS)
        self._rank = rank
        self._watched = range(1, ranks) if rank == 0 else range(1)
        self._closed = threading.Event()
        # Each rank's last beat, and for how many of this rank's it is the same: a clock would go
        # on while the whole machine sleeps.
        self._beats: dict[int, tuple[bytes, int]] = {}
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        count = 0
        while not self._closed.is_set():
            count += 1
            try:
                self._store.set(f"beat/{self._rank}", str(count))
                self.failure = self.failure or self._find_silence()
            except RuntimeError as error:  # the store is gone, and with it rank 0 or its machine
                self.failure = self.failure or f"the ranks' store is gone: {first_line(error)}"
            if self.failure and self._rank:
                os._exit(LOST_RANK_CODE)  # its main thread may wait in a collective for ever
            self._closed.wait(BEAT_SECONDS)

    def _find_silence(self) -> str:
        """Return a sentence about a rank that has failed, or has been silent for too long."""
        for rank in self._watched:
            if self._store.check([f"failed/{rank}"]):
                reason = self._store.get(f"failed/{rank}").decode(errors="replace")
                return reason or f"rank {rank} failed"
            beat = b""
            if self._store.check([f"beat/{rank}"]):
                beat = self._store.get(f"beat/{rank}")
            last, missed = self._beats.get(rank, (b"", -1))
            missed = missed + 1 if beat == last else 0
            self._beats[rank] = beat, missed
            if missed >= MISSED_BEATS:
                return f"rank {rank} has not answered for {DEAD_SECONDS:.0f} seconds"
        return ""

    def wait_for_failure(self) -> None:
        """Wait for two beats, or until there is a failure."""
        deadline = time.monotonic() + 2 * BEAT_SECONDS
        while not self.failure and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def report_failure(self, sentence: str) -> None:
        """Let the ranks that watch this one end at their next beat."""
        try:
            self._store.set(f"failed/{self._rank}", sentence)
        except RuntimeError:
            return  # the store is gone, which they notice themselves

    def close(self) -> None:
        """End the beats."""
        self._closed.set()
        self._thread.join()
