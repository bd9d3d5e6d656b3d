"""The doctor meets real peers over iroh, and learns how they see this machine."""

import json
from dataclasses import replace

import pytest
from helpers.worker.fake_coordinator import MACHINE, RUN, FakeCoordinator, enrol

from barnraise.cli.doctor.peer_meeting import meet_peers
from barnraise.cli.doctor.reach_verdict import NetworkFacts, ReachVerdict, judge_reach
from barnraise.peering.addresses.nat_type import DialBackVerdict, judge_dial_backs
from barnraise.peering.transports.iroh_transport import IrohTransport
from barnraise.protocol.coordinator_messages import Directive, JoinReply, RunView
from barnraise.protocol.enums import RunStatus
from barnraise.protocol.messages import Peer
from barnraise.spec import TextSpec
from barnraise.state_dir import StateDir


@pytest.fixture
def site(world, tmp_path):
    """Return a site that introduces this machine to the peers that a test adds to it."""
    world.spec = replace(world.spec, text=TextSpec(tokenizer="bytes"))
    world.transport = lambda identity: IrohTransport(identity.secret, host="127.0.0.1")
    site = FakeCoordinator(identity=world.mirror, run=RUN)
    site.home = StateDir(tmp_path / "home")
    enrol(site.home, site.url, world.mirror.key)
    view = RunView(id=RUN, name="A run", status=RunStatus.TRAINING, spec=world.spec.to_json())
    site.peers = []
    directive = Directive(run=RUN, machine=MACHINE, status=RunStatus.TRAINING, issued=0)
    site.routes["GET /runs/a-run"] = lambda body: view
    site.routes[f"POST /runs/{RUN}/join"] = lambda body: JoinReply(
        run=view,
        ticket=world.ticket(site.home.identity.key, volunteer=9),
        directive=world.mirror.sign("directive", directive),
        peers=site.peers,
    )
    yield site
    site.close()


def introduce(machine) -> Peer:
    """Return a machine as a site introduces it."""
    return Peer(key=machine.identity.key, addresses=machine.exchange.addresses())


def test_peers_are_met_and_the_folder_is_free_again(world, site):
    site.peers = [introduce(world.machine(number).start()) for number in (1, 2)]
    facts = meet_peers(site.home, "a-run", NetworkFacts(), seconds=60)
    assert facts.peers_tried == facts.peers_connected == 2
    assert judge_dial_backs(facts.reach)[0] is DialBackVerdict.REACHED
    assert facts.line.up > 1e5 and facts.line.down > 1e5
    assert facts.reach.local_addresses and judge_reach(facts) is not ReachVerdict.UDP_BLOCKED
    site.home.open_run(RUN).close()


def test_peers_that_do_not_answer_mean_that_udp_is_blocked(world, site):
    machines = [world.machine(number).start() for number in (1, 2)]
    site.peers = [introduce(machine) for machine in machines]
    for machine in machines:
        machine.exchange.stop()
    facts = meet_peers(site.home, "a-run", NetworkFacts(), seconds=0.5)
    assert judge_reach(facts) is ReachVerdict.UDP_BLOCKED
    site.peers = site.peers[:1]
    facts = meet_peers(site.home, "a-run", NetworkFacts(), seconds=0.5)
    assert judge_reach(facts) is ReachVerdict.PEER_SILENT


def test_run_without_peers_leaves_the_facts_as_they_are(site):
    assert meet_peers(site.home, "a-run", NetworkFacts(port=7)) == NetworkFacts(port=7)


def test_worker_that_trains_here_is_asked_instead(site):
    folder = site.home.open_run(RUN)
    try:
        assert meet_peers(site.home, "a-run", NetworkFacts()) == NetworkFacts()
        reach = {
            "local_addresses": ["192.168.1.2:5"],
            "observations": [
                {"reporter": key * 64, "volunteer": key * 64, "address": f"93.184.216.34:{port}"}
                for key, port in (("a", 1), ("b", 2))
            ],
            "is_reached": None,
            "mapped_address": "",
            "announced_addresses": [],
            "dial_backs": [
                {
                    "reporter": "a" * 64,
                    "host": "93.184.216.34",
                    "is_reached": False,
                    "by_stranger": True,
                }
            ],
        }
        folder.write_status({"reach_facts": reach, "peers": 2})
        facts = meet_peers(site.home, "a-run", NetworkFacts())
        assert judge_reach(facts) is ReachVerdict.SYMMETRIC_NAT
        assert judge_dial_backs(facts.reach) == (DialBackVerdict.NOT_REACHED, 1)
        (folder.path / "status.json").write_text(json.dumps({"reach_facts": {"observations": 3}}))
        assert meet_peers(site.home, "a-run", NetworkFacts()) == NetworkFacts()
    finally:
        folder.close()
