"""Connect a drill's mirrors by a network in which each can be cut off.

Each mirror lives in a network namespace of its own behind one bridge. This needs Linux and root;
elsewhere the drill reports that it could not cut off a mirror.
"""

import os
import subprocess
import sys

SUBNET = "10.83.0"


def supports_namespaces() -> bool:
    """Return whether this process can create network namespaces."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return False
    probe = subprocess.run(["ip", "netns", "list"], capture_output=True, check=False)
    return probe.returncode == 0


class Network:
    """A bridge and `count` namespaces. As a context manager it removes them on exit."""

    def __init__(self, count: int) -> None:
        self.tag = f"bm{os.getpid() % 100_000}"
        self.count = count

    def __enter__(self) -> "Network":
        _ip("link", "add", f"{self.tag}b", "type", "bridge")
        _ip("addr", "add", f"{SUBNET}.1/24", "dev", f"{self.tag}b")
        _ip("link", "set", f"{self.tag}b", "up")
        for n in range(self.count):
            name = self._namespace(n)
            host_end = f"{self.tag}h{n}"
            mirror_end = f"{self.tag}m{n}"
            _ip("netns", "add", name)
            _ip("link", "add", host_end, "type", "veth", "peer", "name", mirror_end)
            _ip("link", "set", mirror_end, "netns", name)
            _ip("link", "set", host_end, "master", f"{self.tag}b", "up")
            _ip("-n", name, "addr", "add", f"{self.host(n)}/24", "dev", mirror_end)
            _ip("-n", name, "link", "set", mirror_end, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for n in range(self.count):  # deletes both ends of the namespace's veth pair too
            _ip("netns", "del", self._namespace(n), check=False)
        _ip("link", "del", f"{self.tag}b", check=False)

    def host(self, n: int) -> str:
        """Return the address of mirror `n`."""
        return f"{SUBNET}.{10 + n}"

    def command_prefix(self, n: int) -> tuple[str, ...]:
        """Return the command that runs other commands in the namespace of mirror `n`."""
        return ("ip", "netns", "exec", self._namespace(n))

    def cut(self, n: int) -> None:
        """Drop every packet to and from mirror `n`, without notice to either side."""
        _ip("link", "set", f"{self.tag}h{n}", "down")

    def heal(self, n: int) -> None:
        """Connect mirror `n` again."""
        _ip("link", "set", f"{self.tag}h{n}", "up")

    def _namespace(self, n: int) -> str:
        return f"{self.tag}n{n}"


class Loopback:
    """The substitute without namespaces: all mirrors share one address, and none can be cut off."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __enter__(self) -> "Loopback":
        return self

    def __exit__(self, *_: object) -> None: ...

    def host(self, n: int) -> str:
        """Return the address of mirror `n`."""
        return "127.0.0.1"

    def command_prefix(self, n: int) -> tuple[str, ...]:
        """Return no prefix."""
        return ()


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=not check)
