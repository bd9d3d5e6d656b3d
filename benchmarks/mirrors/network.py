"""A network for a drill's mirrors: each in a namespace of its own behind one bridge, from which it can be cut off. For
Linux, as root; elsewhere the drill says so and does not cut."""

import os
import subprocess
import sys

SUBNET = "10.83.0"


def possible() -> bool:
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return False
    probe = subprocess.run(["ip", "netns", "list"], capture_output=True, check=False)
    return probe.returncode == 0


class Network:
    """As a context manager: leaving it takes everything away again."""

    def __init__(self, count: int):
        self.tag, self.count = f"bm{os.getpid() % 100_000}", count

    def __enter__(self) -> "Network":
        _ip("link", "add", f"{self.tag}b", "type", "bridge")
        _ip("addr", "add", f"{SUBNET}.1/24", "dev", f"{self.tag}b")
        _ip("link", "set", f"{self.tag}b", "up")
        for n in range(self.count):
            name, ours, theirs = self._name(n), f"{self.tag}h{n}", f"{self.tag}m{n}"
            _ip("netns", "add", name)
            _ip("link", "add", ours, "type", "veth", "peer", "name", theirs)
            _ip("link", "set", theirs, "netns", name)
            _ip("link", "set", ours, "master", f"{self.tag}b", "up")
            _ip("-n", name, "addr", "add", f"{self.host(n)}/24", "dev", theirs)
            _ip("-n", name, "link", "set", theirs, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for n in range(self.count):
            _ip("netns", "del", self._name(n), check=False)  # and with it both ends of its cable
        _ip("link", "del", f"{self.tag}b", check=False)

    def host(self, n: int) -> str:
        return f"{SUBNET}.{10 + n}"

    def through(self, n: int) -> tuple[str, ...]:
        """What a command is run by, to be there."""
        return ("ip", "netns", "exec", self._name(n))

    def cut(self, n: int) -> None:
        """From here on every packet to and from it is lost, without a word to either side."""
        _ip("link", "set", f"{self.tag}h{n}", "down")

    def heal(self, n: int) -> None:
        _ip("link", "set", f"{self.tag}h{n}", "up")

    def _name(self, n: int) -> str:
        return f"{self.tag}n{n}"


class Loopback:
    """Where there are no namespaces: all on one address, and nobody can be cut off."""

    def __init__(self, count: int):
        self.count = count

    def __enter__(self) -> "Loopback":
        return self

    def __exit__(self, *_: object) -> None: ...

    def host(self, n: int) -> str:
        return "127.0.0.1"

    def through(self, n: int) -> tuple[str, ...]:
        return ()


def _ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=not check)
