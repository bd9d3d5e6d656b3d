"""Run real worker processes over iroh with a real site: kill, restart and join late."""

import re

import pytest
from helpers.site.live_site import Person, Site, wait_until

TRIO = ("north", "east", "south")


@pytest.fixture
def person(site: Site) -> Person:
    return Person(site)


def updates_sent_by(site: Site, machine: str) -> int:
    return site.status(machine).get("updates_sent", 0)


@pytest.mark.slow
def test_killed_worker_recovers_and_a_fourth_joins_late(site, person):
    settings = ("recipe.learning_rate=3e-3", "text.tokenizer=bytes")
    run = site.launch_run("Crossbeam", 450_000, *settings)
    for machine in (*TRIO, "west"):
        person.enrol(machine)
    joined = {machine: site.barnraise(machine, "join", run, "--threads", "1") for machine in TRIO}
    wait_until(lambda: all(updates_sent_by(site, m) >= 2 for m in TRIO), "two updates of each")

    before = updates_sent_by(site, "east")
    site.processes.kill("join-east")
    others = {m: updates_sent_by(site, m) for m in ("north", "south")}
    wait_until(
        lambda: all(updates_sent_by(site, m) > n for m, n in others.items()),
        "updates of the other machines",
    )
    joined["east"] = site.barnraise("east", "join", run, "--threads", "1")
    joined["west"] = site.barnraise("west", "join", run, "--threads", "1")
    wait_until(lambda: updates_sent_by(site, "east") > before, "an update of the restarted machine")

    for machine, process in joined.items():
        assert process.wait(600) == 0, site.log(f"join-{machine}")
    ends = {machine: site.status(machine) for machine in joined}
    assert len({(end["vector"], end["anchor"]) for end in ends.values()}) == 1, ends
    assert ends["west"]["updates_sent"] > 0 and ends["west"]["validation_first"][0] > 0
    assert "took the anchor at" in site.log("join-west")
    first, last = ends["north"]["validation_first"][1], ends["north"]["validation_last"][1]
    assert last < first - 1.0


@pytest.mark.slow  # the parts are tested without a site in test_mixing.py
def test_machines_that_average_weights_join_train_and_finish(site, person):
    pair = ["mixer-one", "mixer-two"]
    settings = (
        "recipe.strategy=decentralized-adam",
        "recipe.learning_rate=3e-3",
        "text.tokenizer=bytes",
    )
    run = site.launch_run("Mixer", 50_000_000, *settings, quorum=2)
    for machine in pair:
        person.enrol(machine)
    joined = {machine: site.barnraise(machine, "join", run, "--threads", "1") for machine in pair}
    wait_until(lambda: all(updates_sent_by(site, m) >= 1 for m in pair), "an update of each")

    # One machine vanishes: the other one goes on, and both finish once it is back.
    site.processes.kill(f"join-{pair[1]}")
    before, before_kill = (updates_sent_by(site, machine) for machine in pair)
    wait_until(lambda: updates_sent_by(site, pair[0]) > before, "an update of the machine alone")
    joined[pair[1]] = site.barnraise(pair[1], "join", run, "--threads", "1")
    wait_until(
        lambda: updates_sent_by(site, pair[1]) > before_kill, "an update of the restarted machine"
    )
    wait_until(lambda: site.status(pair[0])["ledger_tokens"] > 50_000, "some training")
    person.post(f"/runs/{run}/finish/")
    for machine, process in joined.items():
        assert process.wait(1200) == 0, site.log(f"join-{machine}")
    ends = {machine: site.status(machine) for machine in pair}
    assert len({(end["vector"], end["anchor"]) for end in ends.values()}) == 1, ends
    first, last = ends[pair[0]]["validation_first"][1], ends[pair[0]]["validation_last"][1]
    assert last < first - 0.3


@pytest.mark.slow  # test_crews.py forms crews without a site
def test_crew_of_two_processes_forms_over_loopback_and_learns(site, person):
    settings = ("recipe.learning_rate=3e-3", "text.tokenizer=bytes", "recipe.round_steps=10")
    run = site.launch_run("Crew", 60_000, *settings)
    for machine in ("lead", "mate"):
        person.enrol(machine)
    options = ("--threads", "1", "--boundary", "16")
    lead = site.barnraise("lead", "join", run, "--crew", "--members", "1", *options)
    code = wait_until(lambda: re.search(r"crew-[\w-]{100,}", site.log("join-lead")), "the code")[0]
    mate = site.barnraise("mate", "crew", "join", code, "--threads", "1")
    wait_until(lambda: site.status("lead").get("step", 0) > 2, "steps of the crew")
    assert "this machine trains blocks" in site.log("crew-mate")
    assert lead.wait(300) == 0, site.log("join-lead")
    assert mate.wait(60) == 0, site.log("crew-mate")
    assert "the crew has ended: its lead left" in site.log("crew-mate")
    end = site.status("lead")
    assert end["validation_last"][1] < end["validation_first"][1] - 0.3
    assert end["ledger_tokens"] >= 60_000
