"""The graph of a run's connections, from the reports of both ends."""

import pytest

from barnraise.protocol.reports import LinkView
from coordinator.telemetry.swarm import build_swarm

pytestmark = pytest.mark.django_db


def link(key: str, sent: float, received: float, agrees: bool | None = None) -> LinkView:
    return LinkView(peer=key[:16], sent_rate=sent, received_rate=received, agrees=agrees)


def test_links_of_both_ends_become_one_and_unknown_peers_are_left_out(
    person, adas_run, volunteer, numbered_report
):
    run, ada = adas_run
    bob = volunteer(person("bob@example.org", name="Bob"), seed=2)
    bob.join(run)
    ada_key, bob_key = ada.machine.key, bob.machine.key
    links = [link(bob_key, 100, 30, True), link("f" * 64, 9, 9), link(ada_key, 1, 1)]
    assert ada.report(run, numbered_report(1, links=links)).status_code == 200
    assert [node["name"] for node in build_swarm(run)["nodes"]] == [
        ada.machine.name,
        bob.machine.name,
    ]
    assert bob.report(run, numbered_report(1, links=[link(ada_key, 40, 90)])).status_code == 200
    [found] = build_swarm(run)["links"]
    from_ada = found["source"] == str(ada.machine.pk)
    assert (found["forward"], found["backward"]) == ((100, 40) if from_ada else (40, 100))
    assert found["agrees"] is True and found["relayed"] is None
    bob.report(run, numbered_report(2, links=[link(ada_key, 40, 90, False)]))
    assert build_swarm(run)["links"][0]["agrees"] is False, "one end that differs is enough"
    relayed = link(ada_key, 40, 90).model_copy(update={"relayed": True})
    bob.report(run, numbered_report(3, links=[relayed]))
    assert build_swarm(run)["links"][0]["relayed"] is True
    bob.report(run, numbered_report(4, activity="left"))
    swarm = build_swarm(run)
    assert len(swarm["nodes"]) == 1 and not swarm["links"] and swarm["hidden"] == 0
