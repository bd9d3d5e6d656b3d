"""Browsers as the site sees them: a websocket on a run, its snapshot, then deltas. Each checks the numbers of all it
hears; the first reads what is in them, which is the same for all."""

import asyncio
import json
import os
import re
import time
from base64 import b64encode
from collections import defaultdict

import numpy as np

TAIL = 40  # bytes of a delta that hold its number
SEQ = re.compile(rb'"seq":(\d+)}$')
PONG, PING, CLOSE = 0x8A, 0x9, 0x8
WIDTH, MOST = 0.01, 60.0  # seconds of the histogram's bins, and of its end


class Heard:
    """What all of them heard. `arrivals`: number of a delta → monotonic seconds; `rows`: … → [(machine, step)]."""

    def __init__(self) -> None:
        self.arrivals: dict[int, list[float]] = defaultdict(list)
        self.rows: dict[int, list[tuple[str, int]]] = {}
        self.bytes = self.gaps = self.closed = self.snapshots = 0
        self.leaving = False

    def effects(self, sent: dict[tuple[str, int], float], since: float) -> np.ndarray:
        """How many (report, watcher) pairs took so long, in bins of WIDTH: from the post's beginning to the delta's
        arrival. Of posts after `since`."""
        found = np.zeros(int(MOST / WIDTH), dtype=np.int64)
        shown: dict[str, int] = {}
        for number in sorted(self.rows):
            begun = []
            for machine, step in self.rows[number]:
                begun += [
                    sent[machine, seq]
                    for seq in range(shown.get(machine, 0) + 1, step + 1)
                    if (machine, seq) in sent
                ]
                shown[machine] = max(step, shown.get(machine, 0))
            begun = np.array([at for at in begun if at >= since])
            if len(begun):
                took = np.subtract.outer(np.array(self.arrivals[number]), begun).ravel()
                bins = np.clip(took / WIDTH, 0, len(found) - 1).astype(np.int64)
                found += np.bincount(bins, minlength=len(found))
        return found


def percentile(bins: np.ndarray, share: float) -> float:
    """Seconds; 0 of nothing."""
    return (
        float(np.searchsorted(np.cumsum(bins), share * bins.sum()) + 1) * WIDTH
        if bins.sum()
        else 0.0
    )


class Watcher(asyncio.Protocol):
    """One websocket, read without a library: two thousand of them share a core with the site."""

    def __init__(self, run: str, port: int, heard: Heard, reads: bool):
        self.run, self.port, self.heard, self.reads = run, port, heard, reads
        self.buffer, self.open, self.last = (
            bytearray(),
            asyncio.get_running_loop().create_future(),
            0,
        )
        self.upgraded = False

    def connection_made(self, transport) -> None:
        self.transport = transport
        key = b64encode(os.urandom(16)).decode()
        transport.write(
            f"GET /ws/runs/{self.run}/ HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nOrigin: http://127.0.0.1:{self.port}\r\n"
            "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits\r\n"
            f"Sec-WebSocket-Key: {key}\r\n\r\n".encode()
        )

    def data_received(self, data: bytes) -> None:
        self.heard.bytes += len(data)
        self.buffer += data
        if not self.upgraded:
            head, ended, rest = bytes(self.buffer).partition(b"\r\n\r\n")
            if not ended:
                return
            if not head.startswith(b"HTTP/1.1 101") or b"permessage-deflate" in head:
                self.open.set_exception(ConnectionError(head[:60].decode()))
                self.transport.close()
                return
            self.buffer, self.upgraded = bytearray(rest), True
            self.open.set_result(None)
        while (frame := self._frame()) is not None:
            self._hear(*frame)

    def _frame(self) -> tuple[int, bytes] | None:
        """(kind, payload) of the first whole frame in the buffer; of a delta that is not read only the end."""
        have = self.buffer
        if len(have) < 2:
            return None
        size, at = have[1], 2
        if size > 125:
            at = 4 if size == 126 else 10
            if len(have) < at:
                return None
            size = int.from_bytes(have[2:at], "big")
        if len(have) < at + size:
            return None
        kind, start = have[0] & 0xF, at if self.reads or size < TAIL else at + size - TAIL
        payload = bytes(have[start : at + size])
        del have[: at + size]
        return kind, payload

    def _hear(self, kind: int, payload: bytes) -> None:
        if kind == PING:
            self.transport.write(
                bytes([PONG, 0x80 | len(payload), 0, 0, 0, 0]) + payload
            )  # masked with zeros
        if kind != 1 or not (found := SEQ.search(payload)):
            return
        number = int(found[1])
        self.heard.gaps += bool(self.last) and number != self.last + 1
        self.last = number
        self.heard.arrivals[number].append(time.monotonic())
        if self.reads:
            rows = json.loads(payload).get("workers", [])
            self.heard.rows[number] = [(row["id"], row["step"]) for row in rows]

    def connection_lost(self, error) -> None:
        self.heard.closed += not self.heard.leaving
        if not self.open.done():
            self.open.set_exception(error or ConnectionError("closed before it was open"))

    async def watch(self) -> None:
        """As a page does it: the socket first, and once it is open the snapshot."""
        await asyncio.get_running_loop().create_connection(lambda: self, "127.0.0.1", self.port)
        await self.open
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(
            f"GET /live/{self.run}/ HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nConnection: close\r\n\r\n".encode()
        )
        answer = await reader.read(-1)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
        self.heard.snapshots += 1
