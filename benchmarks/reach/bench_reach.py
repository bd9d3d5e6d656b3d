"""Measure whether peers behind routers reach each other: in namespaces, and in a simulation.

    make bench-reach            15 minutes, as root on Linux with nftables
    make bench-reach QUICK=1    3 minutes: the links stay idle for half a minute instead of ten

Each scenario runs real exchanges over iroh in network namespaces of its own, whose routers are
nftables rules. The last line is one JSON object. What cannot be measured here, as without root, is
null in it, and the line before says why.
"""

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from dialling_simulation import simulate_swarm
from peer_process import PeerProcess
from reach_network import Home, Place, ReachNetwork, can_connect, find_hops, listen, missing_tools

from barnraise.cli.doctor.reach_verdict import NetworkFacts, ReachVerdict, judge_reach
from barnraise.peering.addresses.nat_type import (
    DialBack,
    DialBackVerdict,
    Observation,
    ReachFacts,
    judge_dial_backs,
)

PORT = 45555
LINK_SECONDS = 30.0  # in which two peers behind routers must be linked
GIVE_UP_SECONDS = 90.0  # after which a scenario goes on without what it waits for
FAILURE_SECONDS = 35.0  # in which peers behind symmetric NATs must not be linked
CUT_SECONDS = 60.0  # in which two peers must notice that they are cut off

Result = dict[str, Any]


def print_step(text: str) -> None:
    """Print one finding with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def address(place: Place) -> list[str]:
    """Return the addresses of a public machine as a site names them."""
    found = [f"{place.ipv4}:{PORT}"] if place.ipv4 else []
    return [*found, f"[{place.ipv6}]:{PORT}"] if place.ipv6 else found


def seconds(value: float) -> float | None:
    """Round a duration; None for what did not happen."""
    return round(value, 1) if math.isfinite(value) else None


class Scenario:
    """A network and its peers; all are removed at the end."""

    def __init__(self, name: str, folder: Path) -> None:
        """Create the network of one scenario."""
        self.name = name
        self.folder = folder / name
        self.folder.mkdir()
        self.network = ReachNetwork(name)
        self._context = self.network.running()
        self.peers: list[PeerProcess] = []

    def __enter__(self) -> "Scenario":
        self._context.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        for peer in self.peers:
            peer.leave()
        self._context.__exit__(None, None, None)

    def start(self, place: Place, known: list[PeerProcess], **setup: Any) -> PeerProcess:
        """Start a peer that is told of public ones, and wait until it runs."""
        setup.setdefault("port", PORT)
        peers = {other.key: address(other.place) for other in known}
        peer = PeerProcess(place, 1 + len(self.peers), self.folder, peers=peers, **setup)
        self.peers.append(peer)
        peer.wait_ready()
        return peer


def wait_for_link(one: PeerProcess, other: PeerProcess, limit: float = GIVE_UP_SECONDS) -> float:
    """Return the seconds until two peers are linked; inf if they are not within the limit."""
    return one.wait_until(lambda state: other.key in state["links"], limit)


# ---- scenarios


def two_homes(folder: Path, idle_seconds: float) -> Result:
    """Link peers behind two routers through a common one, idle, and lose the common peer."""
    with Scenario("two-homes", folder) as scenario:
        network = scenario.network
        common = scenario.start(network.add_public(ipv6=True), [])
        a = scenario.start(network.add_home(Home()), [common], port=0)
        wait_for_link(a, common)
        b = scenario.start(network.add_home(Home(ipv6=True)), [common], port=0)
        joined_at = time.monotonic()
        wait_for_link(b, common)
        punched = wait_for_link(a, b)
        punch_seconds = time.monotonic() - joined_at if math.isfinite(punched) else math.inf
        print_step(f"two homes: A and B linked {punch_seconds:.1f} s after B joined")
        only_ipv6 = scenario.start(network.add_public(ipv4=False, ipv6=True), [common], port=0)
        met_common = wait_for_link(only_ipv6, common)
        met_mixed = wait_for_link(only_ipv6, b)
        print_step(
            f"IPv6 only: linked to a mixed public peer after {met_common:.1f} s and to a mixed "
            f"peer behind a router after {met_mixed:.1f} s"
        )
        stayed = watch_link(a, b, idle_seconds)
        print_step(f"two homes: A and B stayed linked for {stayed:.0f} s")
        reconnect = lose_common(scenario, common, only_ipv6, a, b)
        return {
            "direct_behind_two_nats": math.isfinite(punch_seconds),
            "punch_s": seconds(punch_seconds),
            "stays_linked_s": round(stayed),
            "reconnect_s": seconds(reconnect),
            "ipv6_only": math.isfinite(met_common) and math.isfinite(met_mixed),
        }


def watch_link(one: PeerProcess, other: PeerProcess, limit: float) -> float:
    """Return for how many seconds two peers stay linked, at most the limit."""
    began_at = time.monotonic()
    lost = one.wait_until(lambda state: other.key not in state["links"], limit)
    return min(limit, lost if math.isfinite(lost) else time.monotonic() - began_at)


def lose_common(
    scenario: Scenario, common: PeerProcess, third: PeerProcess, a: PeerProcess, b: PeerProcess
) -> float:
    """Kill the common peer, cut A off until its link to B is gone, and time the new link."""
    third.leave()
    common.kill()
    scenario.network.set_cut(a.place, True)
    for peer, other in ((a, b), (b, a)):
        lost = peer.wait_until(lambda state, key=other.key: key not in state["links"], CUT_SECONDS)
        print_step(f"two homes: a cut line was noticed after {lost:.1f} s")
    scenario.network.set_cut(a.place, False)
    reconnect = wait_for_link(a, b)
    print_step(f"two homes: linked again {reconnect:.1f} s after, without the common peer")
    return reconnect


def symmetric_homes(folder: Path) -> Result:
    """Let two symmetric NATs fail: no link is possible, and the worker must say so."""
    with Scenario("symmetric", folder) as scenario:
        network = scenario.network
        common = scenario.start(network.add_public(), [])
        second = scenario.start(network.add_public(), [common])
        homes = [network.add_home(Home(mode="random")) for _ in range(2)]
        a, b = (scenario.start(home, [common, second], port=0) for home in homes)
        for peer in (a, b):
            wait_for_link(peer, common)
            wait_for_link(peer, second)
        said = a.wait_until(lambda state: "symmetric NAT" in state["said"], GIVE_UP_SECONDS)
        linked = wait_for_link(a, b, FAILURE_SECONDS)
        outcome = "linked" if math.isfinite(linked) else "said"
        if not math.isfinite(said):
            outcome = "silent"
        print_step(f"symmetric NATs: {outcome}; the worker says: {a.state['said']}")
        return {"symmetric_nat": outcome}


def mapped_home(folder: Path, protocol: str) -> bool:
    """Have Debian's miniupnpd map a port; a stranger must get in, and the mapping must end."""
    with Scenario(protocol, folder) as scenario:
        network = scenario.network
        place = network.add_home(Home())
        network.add_port_mapper(place, scenario.folder, protocol)
        setup = {"port_mapping": True, "source_ip": place.public_ipv4}
        peer = scenario.start(place, [], **setup)
        mapped = peer.wait_until(lambda state: state["mapped"], GIVE_UP_SECONDS)
        announced = peer.state["addresses"]
        stranger = scenario.start(network.add_public(), [], port=0)
        stranger.add_peers({peer.key: [peer.state["mapped"]]} if peer.state["mapped"] else {})
        reached = wait_for_link(stranger, peer, LINK_SECONDS)
        is_announced = peer.state["mapped"] in announced
        is_reached = peer.wait_until(lambda state: state["reached"], LINK_SECONDS)
        peer.leave()
        left = network.mapped_ports(place)
        print_step(
            f"port mapping by {protocol}: {peer.state['mapped']} after {mapped:.1f} s, a stranger "
            f"in after {reached:.1f} s, left behind: {left or 'nothing'}"
        )
        return math.isfinite(reached) and math.isfinite(is_reached) and is_announced and left == []


def unmapped_home(folder: Path) -> bool:
    """Map nothing with --no-port-mapping, not even what iroh's binding maps."""
    with Scenario("unmapped", folder) as scenario:
        network = scenario.network
        place = network.add_home(Home())
        network.add_port_mapper(place, scenario.folder, "upnp")
        peer = scenario.start(place, [], source_ip=place.public_ipv4)
        deadline = time.monotonic() + LINK_SECONDS
        time.sleep(12.0)  # iroh maps within two seconds, and the worker removes that after four
        while network.mapped_ports(place) and time.monotonic() < deadline:
            time.sleep(0.5)
        left = network.mapped_ports(place)
        print_step(f"--no-port-mapping: still mapped {left or 'nothing'}")
        return left == [] and not peer.state["mapped"]


def port_mapping(folder: Path) -> Result:
    """Measure port mapping by UPnP, by PCP and turned off."""
    if shutil.which("miniupnpd") is None:
        print_step("port mapping: not measured, because `miniupnpd` is missing")
        return {"port_mapped": None}
    outcomes = [mapped_home(folder, "upnp"), mapped_home(folder, "natpmp"), unmapped_home(folder)]
    return {"port_mapped": all(outcomes)}


def bridges(folder: Path) -> Result:
    """Announce only the line's address on a machine with eight container bridges."""
    with Scenario("bridges", folder) as scenario:
        place = scenario.network.add_public()
        for number in range(8):
            name = f"br-{number:08x}" if number else "docker0"
            place.run("ip", "link", "add", "name", name, "type", "bridge")
            place.run("ip", "addr", "add", f"172.{17 + number}.0.1/16", "dev", name)
            place.run("ip", "link", "set", name, "up")
        peer = scenario.start(place, [])
        announced = peer.state["addresses"]
        print_step(f"eight bridges: announced {', '.join(announced)}")
        return {"bridges_ignored": announced == [f"{place.ipv4}:{PORT}"]}


def forwarded_home(folder: Path) -> Result:
    """Announce a forwarded port, which must let strangers in."""
    with Scenario("forwarded", folder) as scenario:
        network = scenario.network
        place = network.add_home(Home(forwarded_port=PORT))
        announced = f"{place.public_ipv4}:{PORT}"
        peer = scenario.start(place, [], announced=[announced])
        is_announced = peer.state["addresses"][0] == announced
        stranger = scenario.start(network.add_public(), [], port=0)
        stranger.add_peers({peer.key: [announced]})
        reached = wait_for_link(stranger, peer, LINK_SECONDS)
        print_step(f"forwarded port: a stranger in after {reached:.1f} s")
        return {"forwarded_reached": is_announced and math.isfinite(reached)}


# What each scenario's machine is, and what `barnraise doctor` must say of it.
DOCTOR_CASES = {
    ReachVerdict.PUBLIC: lambda network: network.add_public(),
    ReachVerdict.FORWARDED: lambda network: network.add_home(Home(forwarded_port=PORT)),
    ReachVerdict.NAT: lambda network: network.add_home(Home()),
    ReachVerdict.DOUBLE_NAT: lambda network: network.add_home(Home(carrier=True)),
    ReachVerdict.SYMMETRIC_NAT: lambda network: network.add_home(Home(mode="random")),
    ReachVerdict.UDP_BLOCKED: lambda network: network.add_home(Home(blocks_udp=True)),
    ReachVerdict.IPV6_ONLY: lambda network: network.add_public(ipv4=False, ipv6=True),
    ReachVerdict.NO_NETWORK: lambda network: network.add_offline(),
}
# What peers that are asked to dial such a machine find.
DIAL_BACKS = dict.fromkeys(DOCTOR_CASES, DialBackVerdict.NOT_REACHED) | {
    ReachVerdict.PUBLIC: DialBackVerdict.REACHED,
    ReachVerdict.FORWARDED: DialBackVerdict.REACHED,
    ReachVerdict.IPV6_ONLY: DialBackVerdict.REACHED,
    ReachVerdict.UDP_BLOCKED: DialBackVerdict.UNTESTED,
    ReachVerdict.NO_NETWORK: DialBackVerdict.UNTESTED,
}


def doctor(folder: Path) -> Result:
    """Compare the doctor's verdict with the truth in eight networks."""
    with Scenario("doctor", folder) as scenario:
        network = scenario.network
        observers = [scenario.start(network.add_public(ipv6=True), []) for _ in range(2)]
        listen(observers[0].place)
        places = {verdict: create(network) for verdict, create in DOCTOR_CASES.items()}
        peers: dict[ReachVerdict, PeerProcess] = {}
        for verdict, place in places.items():
            forwarded = [f"{place.public_ipv4}:{PORT}"]
            setup = {"announced": forwarded} if verdict is ReachVerdict.FORWARDED else {}
            peers[verdict] = scenario.start(place, observers, **setup)
        deadline = time.monotonic() + LINK_SECONDS
        wrong: list[str] = []
        wrong_dial_backs: list[str] = []
        for verdict, peer in peers.items():
            is_tried = DIAL_BACKS[verdict] is not DialBackVerdict.UNTESTED
            peer.wait_until(lambda state: len(state["links"]) >= 2, deadline - time.monotonic())
            if is_tried:
                peer.wait_until(lambda state: state["facts"]["dial_backs"], GIVE_UP_SECONDS)
            facts = measure_facts(peer, observers)
            judged, (dialled_back, count) = judge_reach(facts), judge_dial_backs(facts.reach)
            print_step(
                f"doctor: {verdict.value}: judged {judged.value}, dialled back: "
                f"{dialled_back.value} (by {count})"
            )
            if judged is not verdict:
                wrong.append(verdict.value)
            if dialled_back is not DIAL_BACKS[verdict]:
                wrong_dial_backs.append(verdict.value)
        return {"doctor_right": not wrong, "dial_backs_right": not wrong_dial_backs}


def measure_facts(peer: PeerProcess, observers: list[PeerProcess]) -> NetworkFacts:
    """Measure what the doctor asks for, on the machine of a peer."""
    seen = peer.state["facts"]
    observations = tuple(Observation(**each) for each in seen["observations"])
    reach = ReachFacts(
        local_addresses=tuple(seen["local_addresses"]),
        observations=observations,
        is_reached=seen["is_reached"],
        mapped_address=seen["mapped_address"],
        announced_addresses=tuple(seen["announced_addresses"]),
        dial_backs=tuple(DialBack(**each) for each in seen["dial_backs"]),
    )
    site = observers[0].place
    has_ipv4 = any(not address.startswith("[") for address in reach.local_addresses)
    return NetworkFacts(
        has_ipv4=has_ipv4,
        has_ipv6=any(address.startswith("[") for address in reach.local_addresses),
        is_site_reachable=can_connect(peer.place, site.ipv4 if has_ipv4 else site.ipv6),
        peers_tried=len(observers),
        peers_connected=sum(peer.is_linked(other) for other in observers),
        hops=find_hops(peer.place, site.ipv4) if has_ipv4 else (),
        port=PORT,
        has_port_mapping=False,
        reach=reach,
    )


def policy(peers: int) -> Result:
    """Simulate the dialling policy."""
    began_at = time.monotonic()
    outcome = simulate_swarm(peers, 0.8)
    print_step(
        f"simulation: {outcome.peers:,} peers, {outcome.natted:,} of them behind routers: "
        f"connected {outcome.is_connected}, every update everywhere {outcome.everyone_has_all}, "
        f"busiest peer {outcome.largest_load:.2f} times the mean, {outcome.statements:.1f} "
        f"statements a peer, {outcome.median_links:.0f} links a peer "
        f"({time.monotonic() - began_at:.0f} s)"
    )
    return {
        "simulated_peers": outcome.peers,
        "every_update_everywhere": outcome.everyone_has_all and outcome.is_connected,
        "largest_load": round(outcome.largest_load, 2),
    }


# ---- all of them


def run_scenarios(folder: Path, quick: bool) -> Result:
    """Run the scenarios of namespaces: the long one, port mapping and the others at one time."""
    results: Result = {}
    failures: list[str] = []

    def run(*scenarios: Callable[[], Result]) -> None:
        for scenario in scenarios:
            try:
                results.update(scenario())
            except Exception as error:
                failures.append(f"{type(error).__name__}: {error}")

    others = (symmetric_homes, bridges, forwarded_home, doctor)
    threads = [
        threading.Thread(target=run, args=scenarios)
        for scenarios in (
            [lambda: two_homes(folder, 30 if quick else 600)],
            [lambda: port_mapping(folder)],
            [partial(scenario, folder) for scenario in others],
        )
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in failures:
        print_step(f"a scenario failed: {failure}")
    return results


def is_success(results: Result) -> bool:
    """Return whether all that was measured is as it must be."""
    return all(
        [
            results.get("direct_behind_two_nats") in (True, None),
            (results.get("punch_s") or 0.0) <= LINK_SECONDS,
            (results.get("reconnect_s") or 0.0) <= LINK_SECONDS,
            results.get("symmetric_nat") in ("said", None),
            results.get("ipv6_only") in (True, None),
            results.get("port_mapped") in (True, None),
            results.get("bridges_ignored") in (True, None),
            results.get("forwarded_reached") in (True, None),
            results.get("doctor_right") in (True, None),
            results.get("dial_backs_right") in (True, None),
            results["every_update_everywhere"],
            results["largest_load"] <= 4.0,
        ]
    )


FIELDS = (
    "direct_behind_two_nats",
    "punch_s",
    "stays_linked_s",
    "reconnect_s",
    "symmetric_nat",
    "port_mapped",
    "ipv6_only",
    "bridges_ignored",
    "forwarded_reached",
    "doctor_right",
    "dial_backs_right",
)


def main() -> None:
    """Run the benchmark; the exit status says whether all targets are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    began_at = time.monotonic()
    results: Result = dict.fromkeys(FIELDS)
    missing = missing_tools()
    with tempfile.TemporaryDirectory(prefix="barnraise-reach-") as folder:
        if missing:
            print_step(f"namespaces: not measured, because {missing}")
        else:
            results |= run_scenarios(Path(folder), quick)
        results |= policy(100 if quick else 1000)
    results["load"] = round(os.getloadavg()[0], 1)
    results["seconds"] = round(time.monotonic() - began_at)
    print(json.dumps(results))
    sys.exit(0 if is_success(results) else 1)


if __name__ == "__main__":
    main()
