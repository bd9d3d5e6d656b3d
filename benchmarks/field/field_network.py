"""Connect the benchmark's workers by lines whose rate and delay are those of a chosen line.

Each worker lives in a network namespace behind one bridge. `tc tbf` limits both directions of its
line; `delay_relay.py` adds the delay. This needs Linux and root.
"""

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil

from barnraise.planning.lines import BITS_PER_BYTE, MEGABIT, Line

PREFIX = "bf"  # of all names, followed by the pid of the benchmark
NAMESPACE = re.compile(rf"^{PREFIX}(\d+)n\d+\b", re.MULTILINE)
DEVICE = "line"  # of each worker, in its namespace
SMALL_MTU, LARGE_MTU = 1500, 9000
LARGE_FROM_MEGABITS = 20.0  # from here on small frames would cost the relay too much CPU
BURST_SECONDS = 0.005
QUEUE_SECONDS = 0.25  # of a home router
MIN_QUEUE_FRAMES = 16
RELAY = Path(__file__).with_name("delay_relay.py")


class NamespaceError(Exception):
    """The network cannot be built; the message says why, in one sentence."""


class FieldNetwork:
    """A bridge, `count` namespaces and the lines between."""

    device = DEVICE

    def __init__(self, count: int, delay_seconds: float | None, cleanup: ExitStack) -> None:
        """Build nothing yet.

        Args:
            count: workers.
            delay_seconds: one way between two workers; half of it on each line. None: the kernel
                connects them without a relay, which takes no CPU.
            cleanup: its end removes everything, also if only a part was made.
        """
        self.count = count
        self._delay = delay_seconds
        self._tag = f"{PREFIX}{os.getpid()}"
        self._subnet = f"10.{84 + os.getpid() % 100}.{os.getpid() % 250}"
        self._relay: subprocess.Popen[str] | None = None
        cleanup.callback(self._remove)

    def create(self) -> None:
        """Create everything, and remove what killed benchmarks left.

        Raises:
            NamespaceError: This process may not, or the system lacks a part.
        """
        if not sys.platform.startswith("linux") or os.geteuid() != 0:
            raise NamespaceError(
                "the benchmark shapes lines in network namespaces, which needs Linux and root"
            )
        try:
            _remove_leftovers()
            self._create_devices()
        except (OSError, subprocess.CalledProcessError) as error:
            detail = (getattr(error, "stderr", None) or str(error)).strip()
            raise NamespaceError(f"the network namespaces cannot be made: {detail}") from None

    def _create_devices(self) -> None:
        bridge = f"{self._tag}b"
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "addr", "add", f"{self._subnet}.1/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "mtu", str(LARGE_MTU), "up")
        for n in range(self.count):
            _run("ip", "netns", "add", self.namespace(n))
        pairs = [f"{self._bridge_end(n)}={self._tag}w{n}" for n in range(self.count)]
        if self._delay is None:
            for bridge_end, worker_end in (pair.split("=") for pair in pairs):
                _run("ip", "link", "add", bridge_end, "type", "veth", "peer", "name", worker_end)
        else:
            self._start_relay(self._delay, pairs)
        for n in range(self.count):
            name = self.namespace(n)
            _run("ip", "link", "set", self._bridge_end(n), "master", bridge, "up")
            _run("ip", "link", "set", f"{self._tag}w{n}", "netns", name)
            _run("ip", "-n", name, "link", "set", f"{self._tag}w{n}", "name", DEVICE)
            _run("ip", "-n", name, "addr", "add", f"{self.host(n)}/24", "dev", DEVICE)
            _run("ip", "-n", name, "link", "set", DEVICE, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")

    def _start_relay(self, delay_seconds: float, pairs: list[str]) -> None:
        self._relay = subprocess.Popen(
            [sys.executable, str(RELAY), str(1000 * delay_seconds / 2), *pairs],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C ends it by way of the cleanup
        )
        assert self._relay.stdout is not None and self._relay.stderr is not None
        if self._relay.stdout.readline().strip() != "ready":
            raise OSError(f"the delay relay failed: {self._relay.stderr.read()[-300:]}")

    def host(self, n: int) -> str:
        """Return the address of worker `n`."""
        return f"{self._subnet}.{10 + n}"

    def namespace(self, n: int) -> str:
        """Return the namespace of worker `n`."""
        return f"{self._tag}n{n}"

    def command_prefix(self, n: int) -> list[str]:
        """Return the command that runs other commands at worker `n`."""
        return ["ip", "netns", "exec", self.namespace(n)]

    def shape(self, line: Line | None) -> None:
        """Limit all lines to a line's rates; None: no limit."""
        for n in range(self.count):
            self.shape_worker(n, line)

    def shape_worker(self, n: int, line: Line | None) -> None:
        """Limit worker `n`'s line to the rates of a line; None: no limit."""
        worker_side = ("ip", "netns", "exec", self.namespace(n))
        _shape_device(worker_side, DEVICE, line and line.up_megabits)
        _shape_device((), self._bridge_end(n), line and line.down_megabits)

    def bytes_sent(self) -> list[int]:
        """Return the bytes that each worker has sent since the network was made.

        Packets that the kernel handed over as one frame count with one header.
        """
        return self._read_counters("rx_bytes")

    def frames_sent(self) -> list[int]:
        """Return the frames that the relay has passed on for each worker."""
        return self._read_counters("rx_packets")

    def _read_counters(self, name: str) -> list[int]:
        folders = [Path("/sys/class/net", self._bridge_end(n)) for n in range(self.count)]
        return [int((folder / "statistics" / name).read_text()) for folder in folders]

    def relay_seconds(self) -> float:
        """Return the CPU seconds of the delay relay, which shares the workers' cores."""
        assert self._relay is not None, "`create` starts it"
        times = psutil.Process(self._relay.pid).cpu_times()
        return times.user + times.system

    def _bridge_end(self, n: int) -> str:
        return f"{self._tag}t{n}"

    def _remove(self) -> None:
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()
        _remove(self._tag)


def _shape_device(prefix: tuple[str, ...], device: str, megabits: float | None) -> None:
    _run(*prefix, "tc", "qdisc", "del", "dev", device, "root", check=False)
    mtu = SMALL_MTU if megabits and megabits < LARGE_FROM_MEGABITS else LARGE_MTU
    _run(*prefix, "ip", "link", "set", device, "mtu", str(mtu))
    if not megabits:
        return
    rate = megabits * MEGABIT
    rate_bytes = rate / BITS_PER_BYTE
    burst = max(mtu + 100, round(rate_bytes * BURST_SECONDS))
    queue = max(MIN_QUEUE_FRAMES * mtu, round(rate_bytes * QUEUE_SECONDS))
    options = ("rate", f"{max(1, round(rate))}bit", "burst", str(burst), "limit", str(queue))
    _run(*prefix, "tc", "qdisc", "add", "dev", device, "root", "tbf", *options)


def _remove_leftovers() -> None:
    for pid in set(NAMESPACE.findall(_run("ip", "netns", "list"))):
        if not psutil.pid_exists(int(pid)):
            _remove(f"{PREFIX}{pid}")


def _remove(tag: str) -> None:
    """Remove what there is of a benchmark's network."""
    for name in _run("ip", "netns", "list", check=False).splitlines():
        if name.startswith(f"{tag}n"):
            _run("ip", "netns", "del", name.split()[0], check=False)
    # A namespace ends some time after its last process, and its devices with it.
    for device in Path("/sys/class/net").glob(f"{tag}t*"):
        _run("ip", "link", "del", device.name, check=False)
    _run("ip", "link", "del", f"{tag}b", check=False)


def _run(*command: str, check: bool = True) -> str:
    """Run a command and return its output."""
    done = subprocess.run(command, check=check, capture_output=True, text=True)
    return done.stdout
