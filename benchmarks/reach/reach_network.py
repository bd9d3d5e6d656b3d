"""Build an internet of network namespaces: public machines, and homes behind routers.

Routers translate addresses with nftables, as Linux in most home routers does. All addresses exist
only inside the namespaces. This needs Linux, root, `ip` and `nft`.
"""

import atexit
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

PREFIX = "rn"  # of all names, followed by the pid of the benchmark
NAMESPACE = re.compile(rf"^{PREFIX}(\d+)-", re.MULTILINE)
PUBLIC_IPV4 = "45.10.0"
PUBLIC_IPV6 = "2a0b:4e07:1"
HOME_IPV4 = "192.168.1"

NAT_RULES = """
table ip nat {{
  chain prerouting {{
    type nat hook prerouting priority -100
{forwards}
  }}
  chain postrouting {{
    type nat hook postrouting priority 100
    oifname "wan" masquerade {mode}
  }}
}}
table inet filter {{
  chain input {{
    type filter hook input priority 0
    iifname "wan" ct state established,related accept
    iifname "wan" meta l4proto ipv6-icmp accept
    iifname "wan" drop
  }}
  chain forward {{
    type filter hook forward priority 0
{blocks}
    ct state established,related accept
    iifname "wan" ct status dnat accept
    iifname "wan" drop
  }}
}}
"""
SITE_PORT = 8080
# A packet whose time to live ends at a router comes back as an error that names it.
HOPS_PROGRAM = """
import socket, sys
RECVERR, ERRQUEUE = 11, 0x2000
for ttl in (1, 2):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.setsockopt(socket.IPPROTO_IP, RECVERR, 1)
        probe.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, ttl)
        probe.settimeout(2)
        try:
            probe.sendto(b"x", (sys.argv[1], 53))
            try:
                probe.recv(1)
            except OSError:
                pass
            found = probe.recvmsg(100, 512, ERRQUEUE)[1]
            print(socket.inet_ntoa(found[0][2][20:24]))
        except OSError:
            break
"""
PORT_MAPPER_RULES = """
table inet miniupnpd {
  chain forward {
  }
  chain prerouting {
  }
  chain postrouting {
  }
  chain map_in {
    type nat hook prerouting priority -100
    jump prerouting
  }
  chain map_out {
    type nat hook postrouting priority 90
    jump postrouting
  }
}
"""
PORT_MAPPER_CONFIG = """ext_ifname=wan
listening_ip=lan
enable_natpmp={natpmp}
enable_upnp={upnp}
secure_mode=yes
system_uptime=yes
uuid=11111111-2222-3333-4444-555555555555
upnp_table_name=miniupnpd
upnp_nat_table_name=miniupnpd
upnp_forward_chain=forward
upnp_nat_chain=prerouting
upnp_nat_postrouting_chain=postrouting
allow 1024-65535 192.168.1.0/24 1024-65535
deny 0-65535 0.0.0.0/0 0-65535
"""


def missing_tools() -> str:
    """Return what this machine lacks to build networks, as a sentence; "" for nothing."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    missing = [tool for tool in ("ip", "nft", "sysctl") if shutil.which(tool) is None]
    if missing:
        return f"Debian's packages iproute2, nftables or procps lack: {', '.join(missing)}"
    probe = subprocess.run(["ip", "netns", "list"], capture_output=True, check=False)
    return "" if probe.returncode == 0 else "this machine does not allow network namespaces"


@dataclass(frozen=True)
class Place:
    """A machine in the network.

    Attributes:
        namespace: The name of its network namespace.
        ipv4: Its address; "" without IPv4.
        ipv6: Its global address; "" without IPv6.
        public_ipv4: The address that the internet sees; "" without IPv4.
        router: The namespace of its router; "" for a public machine.
    """

    namespace: str
    ipv4: str = ""
    ipv6: str = ""
    public_ipv4: str = ""
    router: str = ""

    def run(self, *command: str) -> str:
        """Run a command in the machine's namespace and return its output."""
        return _run("ip", "netns", "exec", self.namespace, *command)


@dataclass(frozen=True)
class Home:
    """What a home's line and router are like.

    Attributes:
        mode: Of `masquerade`: "" for one port whatever the destination, "random" for another port
            for each.
        ipv6: Whether the line has IPv6 too.
        carrier: Whether the provider translates addresses once more.
        forwarded_port: A UDP port that the router forwards to the machine; 0: none.
        blocks_udp: Whether the router lets no UDP through but DNS.
    """

    mode: str = ""
    ipv6: bool = False
    carrier: bool = False
    forwarded_port: int = 0
    blocks_udp: bool = False


class ReachNetwork:
    """An internet: a bridge, and the machines and homes at it."""

    def __init__(self, name: str = "") -> None:
        """Choose names; `name` tells networks of one process apart."""
        self.tag = f"{PREFIX}{os.getpid()}-{name}-"
        self._count = 0
        self._daemons: list[subprocess.Popen[bytes]] = []

    @contextmanager
    def running(self) -> Iterator["ReachNetwork"]:
        """Create the bridge, and remove everything at the end."""
        _remove_leftovers()
        try:
            self._add_namespace(self._internet_namespace)
            _run(
                "ip",
                "-n",
                self._internet_namespace,
                "link",
                "add",
                "name",
                "bridge0",
                "type",
                "bridge",
            )
            _run("ip", "-n", self._internet_namespace, "link", "set", "bridge0", "up")
            yield self
        finally:
            for daemon in self._daemons:
                daemon.send_signal(signal.SIGTERM)
                daemon.wait()
            _remove(self.tag)

    @property
    def _internet_namespace(self) -> str:
        return f"{self.tag}w"

    def add_public(self, ipv4: bool = True, ipv6: bool = False) -> Place:
        """Add a machine with addresses of its own on the internet."""
        number = self._next_number()
        namespace = f"{self.tag}p{number}"
        self._add_namespace(namespace)
        self._attach(namespace, number, ipv4, ipv6)
        return Place(
            namespace,
            ipv4=f"{PUBLIC_IPV4}.{number}" if ipv4 else "",
            ipv6=f"{PUBLIC_IPV6}::{number}" if ipv6 else "",
            public_ipv4=f"{PUBLIC_IPV4}.{number}" if ipv4 else "",
        )

    def add_offline(self) -> Place:
        """Add a machine without any network."""
        namespace = f"{self.tag}o{self._next_number()}"
        self._add_namespace(namespace)
        return Place(namespace)

    def add_home(self, home: Home) -> Place:
        """Add a home with one machine behind its router."""
        number = self._next_number()
        router, machine = f"{self.tag}r{number}", f"{self.tag}m{number}"
        self._add_namespace(router)
        self._add_namespace(machine)
        if home.carrier:
            self._add_carrier(router, number)
        else:
            self._attach(router, number, True, home.ipv6)
        _link((router, "lan"), (machine, "eth0"))
        _add_address(router, "lan", f"{HOME_IPV4}.1/24")
        own = f"{HOME_IPV4}.{50 + number}"
        _add_address(machine, "eth0", f"{own}/24")
        _run("ip", "-n", machine, "route", "add", "default", "via", f"{HOME_IPV4}.1")
        ipv6 = ""
        if home.ipv6:
            prefix = f"2a0b:4e07:{100 + number}"
            ipv6 = f"{prefix}::50"
            _add_address(router, "lan", f"{prefix}::1/64")
            _add_address(machine, "eth0", f"{ipv6}/64")
            _run("ip", "-n", machine, "-6", "route", "add", "default", "via", f"{prefix}::1")
            _run(
                *("ip", "-n", self._internet_namespace, "-6", "route", "add", f"{prefix}::/64"),
                *("via", f"{PUBLIC_IPV6}::{number}", "dev", "bridge0"),
            )
        self._translate(router, home, own)
        return Place(machine, own, ipv6, f"{PUBLIC_IPV4}.{number}", router)

    def add_port_mapper(self, place: Place, folder: Path, protocol: str) -> None:
        """Run Debian's `miniupnpd` on a home's router.

        Args:
            place: The machine in the home.
            folder: Where the daemon's files go.
            protocol: "upnp", or "natpmp", which means PCP too.
        """
        _load_nft_rules(place.router, PORT_MAPPER_RULES)
        config = folder / f"{place.router}.conf"
        config.write_text(
            PORT_MAPPER_CONFIG.format(
                natpmp="yes" if protocol == "natpmp" else "no",
                upnp="yes" if protocol == "upnp" else "no",
            )
        )
        pid_file = folder / f"{place.router}.pid"
        with (folder / f"{place.router}.log").open("wb") as log:
            daemon = subprocess.Popen(
                [
                    *("ip", "netns", "exec", place.router),
                    *("miniupnpd", "-d", "-f", str(config), "-P", str(pid_file)),
                ],
                stdout=log,
                stderr=log,
            )
        self._daemons.append(daemon)

    def mapped_ports(self, place: Place) -> list[int]:
        """Return the public UDP ports that a home's port mapper forwards."""
        rules = _run(
            "ip", "netns", "exec", place.router, "nft", "list", "table", "inet", "miniupnpd"
        )
        return [int(port) for port in re.findall(r"dport (\d+) dnat", rules)]

    def set_cut(self, place: Place, is_cut: bool) -> None:
        """Cut a machine off from its network, or connect it again."""
        device = "eth0" if place.router else "wan"
        rules = (
            f"table inet cut {{\n chain out {{\n type filter hook output priority -10\n"
            f' oifname "{device}" drop\n }}\n chain in {{\n type filter hook input priority -10\n'
            f' iifname "{device}" drop\n }}\n}}\n'
        )
        if is_cut:
            _load_nft_rules(place.namespace, rules)
        else:
            place.run("nft", "delete", "table", "inet", "cut")

    def change_address(self, place: Place) -> Place:
        """Give a machine another IPv4 address, as another network would, and take the old one.

        A public machine gets one of the internet; a machine in a home one of the home's network.
        """
        number = self._next_number()
        if place.router:
            device, address = "eth0", f"{HOME_IPV4}.{150 + number}"
            route = ("via", f"{HOME_IPV4}.1")
        else:
            device, address, route = "wan", f"{PUBLIC_IPV4}.{number}", ("dev", "wan")
        _run("ip", "-n", place.namespace, "-4", "addr", "flush", "dev", device)
        _add_address(place.namespace, device, f"{address}/24")
        _run("ip", "-n", place.namespace, "route", "replace", "default", *route)
        public = place.public_ipv4 if place.router else address
        return replace(place, ipv4=address, public_ipv4=public)

    def _next_number(self) -> int:
        self._count += 1
        return self._count

    def _add_namespace(self, name: str) -> None:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")

    def _attach(self, namespace: str, number: int, ipv4: bool, ipv6: bool) -> None:
        """Connect a namespace's interface `wan` to the internet."""
        end = f"w{number}"
        _link((namespace, "wan"), (self._internet_namespace, end))
        _run("ip", "-n", self._internet_namespace, "link", "set", end, "master", "bridge0")
        if ipv4:
            _add_address(namespace, "wan", f"{PUBLIC_IPV4}.{number}/24")
            _run("ip", "-n", namespace, "route", "add", "default", "dev", "wan")
        if ipv6:
            if number == 1 or not self._has_ipv6_gateway():
                _add_address(self._internet_namespace, "bridge0", f"{PUBLIC_IPV6}::ffff/64")
                _set_sysctl(self._internet_namespace, "net.ipv6.conf.all.forwarding=1")
            _add_address(namespace, "wan", f"{PUBLIC_IPV6}::{number}/64")
            _run(
                *("ip", "-n", namespace, "-6", "route", "add", "default"),
                *("via", f"{PUBLIC_IPV6}::ffff"),
            )

    def _has_ipv6_gateway(self) -> bool:
        shown = _run("ip", "-n", self._internet_namespace, "-6", "addr", "show", "dev", "bridge0")
        return f"{PUBLIC_IPV6}::ffff" in shown

    def _add_carrier(self, router: str, number: int) -> None:
        """Put a provider's NAT between a home's router and the internet."""
        carrier = f"{self.tag}c{number}"
        self._add_namespace(carrier)
        self._attach(carrier, number, True, False)
        _link((carrier, "lan"), (router, "wan"))
        _add_address(carrier, "lan", "100.64.0.1/24")
        _add_address(router, "wan", "100.64.0.2/24")
        _run("ip", "-n", router, "route", "add", "default", "via", "100.64.0.1")
        self._translate(carrier, Home(), "100.64.0.2")

    def _translate(self, router: str, home: Home, machine: str) -> None:
        forwards = blocks = ""
        if home.forwarded_port:
            forwards = f'    iifname "wan" udp dport {home.forwarded_port} dnat to {machine}'
        if home.blocks_udp:
            blocks = "    meta l4proto udp udp dport != 53 drop"
        _set_sysctl(router, "net.ipv4.ip_forward=1")
        if home.ipv6:
            _set_sysctl(router, "net.ipv6.conf.all.forwarding=1")
        _load_nft_rules(router, NAT_RULES.format(mode=home.mode, forwards=forwards, blocks=blocks))


def listen(place: Place) -> None:
    """Have a machine accept TCP connections until its namespace goes, as a site does."""
    program = (
        "import socket\n"
        f"s = socket.create_server(('::', {SITE_PORT}), family=socket.AF_INET6, "
        "dualstack_ipv6=True)\n"
        "while True: s.accept()[0].close()"
    )
    process = subprocess.Popen(
        ["ip", "netns", "exec", place.namespace, sys.executable, "-c", program]
    )
    atexit.register(process.kill)


def can_connect(place: Place, host: str) -> bool:
    """Return whether a machine reaches a listening one by TCP."""
    program = f"import socket; socket.create_connection(({host!r}, {SITE_PORT}), timeout=5).close()"
    command = ["ip", "netns", "exec", place.namespace, sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def find_hops(place: Place, target: str) -> tuple[str, ...]:
    """Return the first two routers on the way from a machine, by the errors that they answer."""
    command = ["ip", "netns", "exec", place.namespace, sys.executable, "-c", HOPS_PROGRAM, target]
    shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return tuple(shown.split())


def _link(one: tuple[str, str], other: tuple[str, str]) -> None:
    """Connect two namespaces by a cable; each end is (namespace, interface)."""
    _run(
        *("ip", "link", "add", "name", one[1], "netns", one[0], "type", "veth"),
        *("peer", "name", other[1], "netns", other[0]),
    )
    for namespace, device in (one, other):
        _run("ip", "-n", namespace, "link", "set", device, "up")


def _add_address(namespace: str, device: str, address: str) -> None:
    # Without "nodad" an IPv6 address cannot be used for its first second.
    extra = ["nodad"] if ":" in address else []
    _run("ip", "-n", namespace, "addr", "add", address, "dev", device, *extra)


def _set_sysctl(namespace: str, setting: str) -> None:
    _run("ip", "netns", "exec", namespace, "sysctl", "-qw", setting)


def _load_nft_rules(namespace: str, rules: str) -> None:
    _run("ip", "netns", "exec", namespace, "nft", "-f", "-", text=rules)


def _remove_leftovers() -> None:
    """Remove the networks of benchmarks that were killed."""
    for pid in set(NAMESPACE.findall(_run("ip", "netns", "list"))):
        if not psutil.pid_exists(int(pid)):
            _remove(f"{PREFIX}{pid}-")


def _remove(tag: str) -> None:
    for line in _run("ip", "netns", "list").splitlines():
        if line.startswith(tag):  # its interfaces go with it
            _run("ip", "netns", "del", line.split()[0])


def _run(*command: str, text: str = "") -> str:
    """Run a command and return its output.

    Raises:
        RuntimeError: It failed; the text says with what message.
    """
    result = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}: {result.stderr.strip()}")
    return result.stdout
