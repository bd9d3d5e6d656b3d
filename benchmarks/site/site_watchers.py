"""Simulate browsers that watch a run: a websocket, its snapshot, then deltas.

Each checks the numbers of all deltas it receives. The first also reads their content, which is the
same for all.
"""

import asyncio
import json
import os
import re
import time
from base64 import b64encode
from collections import defaultdict
from typing import cast

import numpy as np

TAIL_BYTES = 40  # at the end of a delta, which contain its number
NUMBER_PATTERN = re.compile(rb'"seq":(\d+)}$')
TEXT = 0x1
PING = 0x9
PONG = 0x8A  # with the final-fragment bit
BIN_SECONDS = 0.01  # of the histogram
MAX_SECONDS = 60.0  # of the histogram


class ReceivedDeltas:
    """What all watchers received.

    Attributes:
        arrivals: Number of a delta → monotonic seconds at which each watcher received it.
        rows: Number of a delta → the (machine, step) pairs in it.
        bytes: Bytes received by all watchers.
        gaps: Missing numbers between deltas.
        closed: Connections that the site closed.
        snapshots: Snapshots received.
        leaving: Whether the load has ended, after which a closed connection does not count.
    """

    def __init__(self) -> None:
        self.arrivals: dict[int, list[float]] = defaultdict(list)
        self.rows: dict[int, list[tuple[str, int]]] = {}
        self.bytes = 0
        self.gaps = 0
        self.closed = 0
        self.snapshots = 0
        self.leaving = False

    def delay_histogram(self, sent: dict[tuple[str, int], float], since: float) -> np.ndarray:
        """Count (report, watcher) pairs by the delay from a report's post to the delta's arrival.

        Args:
            sent: (machine, report number) → monotonic seconds at which its post began.
            since: Monotonic seconds; earlier posts do not count.

        Returns:
            Counts in bins of `BIN_SECONDS`, int64.
        """
        histogram = np.zeros(int(MAX_SECONDS / BIN_SECONDS), dtype=np.int64)
        shown: dict[str, int] = {}  # machine → its last step in a delta
        for number in sorted(self.rows):
            posts: list[float] = []
            for machine, step in self.rows[number]:
                fresh = range(shown.get(machine, 0) + 1, step + 1)
                posts += [sent[machine, seq] for seq in fresh if (machine, seq) in sent]
                shown[machine] = max(step, shown.get(machine, 0))
            counted = np.array([at for at in posts if at >= since])
            if len(counted):
                delays = np.subtract.outer(np.array(self.arrivals[number]), counted).ravel()
                bins = np.clip(delays / BIN_SECONDS, 0, len(histogram) - 1).astype(np.int64)
                histogram += np.bincount(bins, minlength=len(histogram))
        return histogram


def percentile(histogram: np.ndarray, share: float) -> float:
    """Return a percentile in seconds; 0 for an empty histogram."""
    if not histogram.sum():
        return 0.0
    position = np.searchsorted(np.cumsum(histogram), share * histogram.sum())
    return float(position + 1) * BIN_SECONDS


class Watcher(asyncio.Protocol):
    """One websocket, read without a library: two thousand of them share a core with the site.

    Args:
        run: Id of the run.
        port: Port of the site.
        received: Collects what all watchers receive.
        reads_content: Whether this watcher reads the deltas' rows.
    """

    def __init__(self, run: str, port: int, received: ReceivedDeltas, reads_content: bool) -> None:
        self.run = run
        self.port = port
        self.received = received
        self.reads_content = reads_content
        self.buffer = bytearray()
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.last_number = 0
        self.is_upgraded = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Request the websocket."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        key = b64encode(os.urandom(16)).decode()
        self.transport.write(
            f"GET /ws/runs/{self.run}/ HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n"
            f"Origin: http://127.0.0.1:{self.port}\r\n"
            "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits\r\n"
            f"Sec-WebSocket-Key: {key}\r\n\r\n".encode()
        )

    def data_received(self, data: bytes) -> None:
        """Read the upgrade's answer, then frames."""
        self.received.bytes += len(data)
        self.buffer += data
        if not self.is_upgraded:
            head, separator, rest = bytes(self.buffer).partition(b"\r\n\r\n")
            if not separator:
                return
            if not head.startswith(b"HTTP/1.1 101") or b"permessage-deflate" in head:
                self.opened.set_exception(ConnectionError(head[:60].decode()))
                self.transport.close()
                return
            self.buffer = bytearray(rest)
            self.is_upgraded = True
            self.opened.set_result(None)
        while (frame := self._next_frame()) is not None:
            self._receive_frame(*frame)

    def _next_frame(self) -> tuple[int, bytes] | None:
        """Remove the first whole frame from the buffer and return its opcode and payload.

        A watcher that does not read the content gets only the payload's end.
        """
        buffer = self.buffer
        if len(buffer) < 2:
            return None
        size = buffer[1]
        offset = 2
        if size > 125:
            offset = 4 if size == 126 else 10
            if len(buffer) < offset:
                return None
            size = int.from_bytes(buffer[2:offset], "big")
        end = offset + size
        if len(buffer) < end:
            return None
        opcode = buffer[0] & 0xF
        start = offset if self.reads_content or size < TAIL_BYTES else end - TAIL_BYTES
        payload = bytes(buffer[start:end])
        del buffer[:end]
        return opcode, payload

    def _receive_frame(self, opcode: int, payload: bytes) -> None:
        if opcode == PING:  # the answer is masked with zeros
            self.transport.write(bytes([PONG, 0x80 | len(payload), 0, 0, 0, 0]) + payload)
        match = NUMBER_PATTERN.search(payload) if opcode == TEXT else None
        if match is None:
            return
        number = int(match[1])
        self.received.gaps += bool(self.last_number) and number != self.last_number + 1
        self.last_number = number
        self.received.arrivals[number].append(time.monotonic())
        if self.reads_content:
            delta = json.loads(payload)
            rows = delta.get("workers", []) + delta.get("worker_changes", [])
            steps = [(row["id"], row["step"]) for row in rows if "step" in row]
            self.received.rows[number] = steps

    def connection_lost(self, exc: Exception | None) -> None:
        """Count a connection that the site closed."""
        self.received.closed += not self.received.leaving
        if not self.opened.done():
            self.opened.set_exception(exc or ConnectionError("closed before it was open"))

    async def watch(self) -> None:
        """Open the websocket, then fetch the snapshot, as a page does."""
        await asyncio.get_running_loop().create_connection(lambda: self, "127.0.0.1", self.port)
        await self.opened
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(
            f"GET /live/{self.run}/ HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n"
            "Connection: close\r\n\r\n".encode()
        )
        answer = await reader.read(-1)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
        self.received.snapshots += 1
