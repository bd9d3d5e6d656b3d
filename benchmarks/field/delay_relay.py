"""Delay every packet between two ends of a line, in a process of its own.

Each worker's namespace has a TAP device, and so has the bridge. The relay copies Ethernet frames
between the two after the line's delay, so TCP and UDP are delayed alike and no program notices it.
The kernel's `netem` would do the same, but many machines lack that module. Rates are limited by
`tc tbf` on both devices, not here.

The workers share their cores with the relay. So the kernel hands it up to 64 KiB of TCP's or UDP's
packets as one frame where the system can (segmentation offload), as it does to a network card.

    python delay_relay.py DELAY_MS BRIDGE_TAP=WORKER_TAP …

It creates the devices, prints "ready", and ends when its standard input is closed.
"""

import fcntl
import os
import selectors
import struct
import sys
import time
from collections import deque

# Constants of <linux/if_tun.h>.
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6, TUN_F_USO4, TUN_F_USO6 = 0x01, 0x02, 0x04, 0x20, 0x40
TCP_OFFLOAD = TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6
UDP_OFFLOAD = TUN_F_USO4 | TUN_F_USO6  # since Linux 6.2
MAX_FRAME = 1 << 17  # more than 64 KiB and their headers
MAX_WAITING_BYTES = (
    1 << 26
)  # frames beyond that drop; they would not fit the devices' queues either


def open_tap(name: str) -> int:
    """Create a TAP device and return its file descriptor.

    Each frame begins with the kernel's header on how to segment it, which the other device needs.
    """
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH14x", name.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR)
    fcntl.ioctl(descriptor, TUNSETIFF, request)
    try:
        fcntl.ioctl(descriptor, TUNSETOFFLOAD, TCP_OFFLOAD | UDP_OFFLOAD)
    except OSError:  # an older kernel
        fcntl.ioctl(descriptor, TUNSETOFFLOAD, TCP_OFFLOAD)
    return descriptor


class DelayLine:
    """Frames on their way, in the order in which they are due."""

    def __init__(self, delay_seconds: float) -> None:
        """Delay all frames equally."""
        self._delay = delay_seconds
        self._waiting: deque[tuple[float, int, bytes]] = deque()
        self._waiting_bytes = 0

    def accept_frames(self, source: int, target: int) -> None:
        """Read what a device has sent."""
        while True:
            try:
                frame = os.read(source, MAX_FRAME)
            except BlockingIOError:
                return
            if self._waiting_bytes < MAX_WAITING_BYTES:
                self._waiting.append((time.monotonic() + self._delay, target, frame))
                self._waiting_bytes += len(frame)

    def deliver_due(self) -> float | None:
        """Write the frames that are due, and return the seconds until the next one."""
        while self._waiting:
            due, target, frame = self._waiting[0]
            remaining = due - time.monotonic()
            if remaining > 0:
                return remaining
            self._waiting.popleft()
            self._waiting_bytes -= len(frame)
            try:
                os.write(target, frame)
            except OSError:
                continue  # the device is down or its queue is full: the frame is lost, as on a line
        return None


def main() -> None:
    """Relay until standard input is closed."""
    delay_line = DelayLine(float(sys.argv[1]) / 1000)
    selector = selectors.DefaultSelector()
    for pair in sys.argv[2:]:
        bridge_end, worker_end = (open_tap(name) for name in pair.split("="))
        selector.register(bridge_end, selectors.EVENT_READ, worker_end)
        selector.register(worker_end, selectors.EVENT_READ, bridge_end)
    selector.register(sys.stdin.fileno(), selectors.EVENT_READ, None)
    print("ready", flush=True)
    wait: float | None = None
    while True:
        for key, _ in selector.select(wait):
            if key.data is None:
                return
            delay_line.accept_frames(key.fd, key.data)
        wait = delay_line.deliver_due()


if __name__ == "__main__":
    main()
