"""Run real worker processes over iroh with a real site: kill, restart and join late."""

import signal

import pytest
from helpers.live_site import Person, Site, wait_until

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


def test_ctrl_c_saves_and_leaves_and_the_site_shows_it(site, person):
    run = site.launch_run("Ridge", 5_000_000, "text.tokenizer=bytes")
    person.enrol("solo")
    worker = site.barnraise("solo", "join", run, "--threads", "1")
    wait_until(lambda: updates_sent_by(site, "solo") >= 1, "an update")
    worker.send_signal(signal.SIGINT)
    assert worker.wait(600) == 0, site.log("join-solo")
    assert "Everything is saved" in site.log("join-solo")

    def machines() -> list[dict]:
        return person.http.get(f"/live/{run}/").json()["workers"]

    wait_until(
        lambda: [w["activity"] for w in machines()] == ["left"], "the departure on the site", 20
    )
