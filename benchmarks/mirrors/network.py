"""Connect a drill's mirrors by a network in which each can be cut off.

Each mirror lives in a network namespace of its own behind one bridge. This needs Linux and root;
elsewhere the drill reports that it could not cut off a mirror.
"""

import os
import re
import subprocess
import sys
from contextlib import ExitStack

import psutil

PREFIX = "bm"  # of all names, followed by the pid of the drill
NAMESPACE = re.compile(rf"^{PREFIX}(\d+)n\d+\b", re.MULTILINE)


def supports_namespaces() -> bool:
    """Return whether this process can create network namespaces."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return False
    probe = subprocess.run(["ip", "netns", "list"], capture_output=True, check=False)
    return probe.returncode == 0


class Network:
    """A bridge and `count` namespaces.

    Args:
        count: Number of mirrors.
        cleanup: Its end removes the namespaces, also if only some of them were made.
    """

    def __init__(self, count: int, cleanup: ExitStack) -> None:
        self.tag = f"{PREFIX}{os.getpid()}"
        self.subnet = f"10.83.{os.getpid() % 250}"  # two drills can run at one time
        self.count = count
        cleanup.callback(_remove, self.tag)

    def create(self) -> None:
        """Create the bridge and the namespaces, and remove those of drills that were killed."""
        _remove_leftovers()
        _run_ip("link", "add", f"{self.tag}b", "type", "bridge")
        _run_ip("addr", "add", f"{self.subnet}.1/24", "dev", f"{self.tag}b")
        _run_ip("link", "set", f"{self.tag}b", "up")
        for n in range(self.count):
            name = self._namespace_name(n)
            host_end = f"{self.tag}h{n}"
            mirror_end = f"{self.tag}m{n}"
            _run_ip("netns", "add", name)
            _run_ip("link", "add", host_end, "type", "veth", "peer", "name", mirror_end)
            _run_ip("link", "set", mirror_end, "netns", name)
            _run_ip("link", "set", host_end, "master", f"{self.tag}b", "up")
            _run_ip("-n", name, "addr", "add", f"{self.host(n)}/24", "dev", mirror_end)
            _run_ip("-n", name, "link", "set", mirror_end, "up")
            _run_ip("-n", name, "link", "set", "lo", "up")

    def host(self, n: int) -> str:
        """Return the address of mirror `n`."""
        return f"{self.subnet}.{10 + n}"

    def command_prefix(self, n: int) -> tuple[str, ...]:
        """Return the command that runs other commands in the namespace of mirror `n`."""
        return ("ip", "netns", "exec", self._namespace_name(n))

    def cut(self, n: int) -> None:
        """Drop every packet to and from mirror `n`, without notice to either side."""
        _run_ip("link", "set", f"{self.tag}h{n}", "down")

    def heal(self, n: int) -> None:
        """Connect mirror `n` again."""
        _run_ip("link", "set", f"{self.tag}h{n}", "up")

    def _namespace_name(self, n: int) -> str:
        return f"{self.tag}n{n}"


class Loopback:
    """The substitute without namespaces: all mirrors share one address, and none can be cut off."""

    def host(self, n: int) -> str:
        """Return the address of mirror `n`."""
        return "127.0.0.1"

    def command_prefix(self, n: int) -> tuple[str, ...]:
        """Return no prefix."""
        return ()


def _remove_leftovers() -> None:
    for pid in set(NAMESPACE.findall(_run_ip("netns", "list"))):
        if not psutil.pid_exists(int(pid)):
            _remove(f"{PREFIX}{pid}")


def _remove(tag: str) -> None:
    """Remove what there is of a drill's network."""
    for name in _run_ip("netns", "list").splitlines():
        if name.startswith(f"{tag}n"):  # deletes both ends of the namespace's veth pair too
            _run_ip("netns", "del", name.split()[0], check=False)
    _run_ip("link", "del", f"{tag}b", check=False)


def _run_ip(*arguments: str, check: bool = True) -> str:
    """Run a command of `ip` and return its output."""
    errors = None if check else subprocess.DEVNULL
    result = subprocess.run(
        ["ip", *arguments], check=check, stdout=subprocess.PIPE, stderr=errors, text=True
    )
    return result.stdout
