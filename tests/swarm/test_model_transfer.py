"""Finish a run, serve its weights, fetch them, and compare them with the site's digest."""

import json
import signal

import pytest
from helpers.site.live_site import Person, Site, wait_until

PATIENCE = 600  # seconds; other processes may use the machine that runs the tests
SMALL_MODEL = ("model.layers=2", "model.width=32", "model.heads=2", "model.context=32")


@pytest.fixture
def person(site: Site) -> Person:
    return Person(site)


def test_machine_leaves_returns_finishes_and_serves_its_weights(site, person):
    """Ctrl-C saves; the next join continues; a guest fetches the weights that the site names."""
    settings = ("recipe.learning_rate=3e-3", "text.tokenizer=bytes", *SMALL_MODEL)
    run = site.launch_run("Keepsake", 40_000, *settings)
    for machine in ("keeper", "guest"):
        person.enrol(machine)
    interrupt_after_a_step(site, person, run)
    trained = site.barnraise("keeper", "join", run, "--threads", "1", "--eager")
    assert trained.wait(PATIENCE) == 0, site.log("join-keeper")
    anchor = site.status("keeper")["anchor"]
    page = wait_until(
        lambda: (text := person.http.get(f"/runs/{run}/").text) and anchor in text and text,
        "a checkpoint",
    )
    assert "barnraise serve" in page or "barnraise export" in page
    model = site.folder / "model"
    without_server = site.barnraise("guest", "fetch", run, str(model))
    assert without_server.wait(PATIENCE) == 1 and "try again later" in site.log("fetch-guest")

    served = site.barnraise("keeper", "serve", run)
    wait_until(lambda: "Sharing" in site.log("serve-keeper"), "serving")
    fetched = site.barnraise("guest", "fetch", run, str(model), "--digest", anchor)
    assert fetched.wait(PATIENCE) == 0, site.log("fetch-guest")
    assert anchor in site.log("fetch-guest") and (model / "config.json").exists()
    wrong = site.barnraise("guest", "fetch", run, str(model), "--digest", "0" * 64)
    assert wrong.wait(PATIENCE) == 1 and "you requested" in site.log("fetch-guest")
    served.send_signal(signal.SIGINT)
    assert served.wait(PATIENCE) == 0, site.log("serve-keeper")


def interrupt_after_a_step(site: Site, person: Person, run: str) -> None:
    """Press Ctrl-C while the keeper trains, and wait until the site shows that it has left."""
    worker = site.barnraise("keeper", "join", run, "--threads", "1")
    wait_until(lambda: site.status("keeper").get("step", 0) >= 1, "a step")
    worker.send_signal(signal.SIGINT)
    assert worker.wait(PATIENCE) == 0, site.log("join-keeper")
    assert "Everything is saved" in site.log("join-keeper")

    def machines() -> list[dict]:
        return person.http.get(f"/live/{run}/").json()["workers"]

    wait_until(
        lambda: [w["activity"] for w in machines()] == ["left"], "the departure on the site", 20
    )


def read_status(site: Site, machine: str, name: str) -> dict:
    """Return a machine's status in the run of that name; {} before it has one."""
    paths = (site.folder / machine / "runs").glob("*/status.json")
    statuses = [json.loads(path.read_text()) for path in paths]
    return next((status for status in statuses if status["name"] == name), {})


@pytest.mark.slow
def test_warm_started_run_begins_with_the_other_runs_final_weights(site, person):
    """The owner's machine lacks the other run, and reports that until the weights are served.

    Each run waits for two machines, so that none has finished before the other joins.
    """
    settings = ("recipe.learning_rate=3e-3", *SMALL_MODEL, "model.vocabulary=300")
    run = site.launch_run("Forebear", 20_000, *settings, quorum=2)
    for machine in ("elder", "heir", "cousin"):
        person.enrol(machine)
    parents = [site.barnraise(name, "join", run, "--threads", "1") for name in ("elder", "cousin")]
    assert [parent.wait(PATIENCE) for parent in parents] == [0, 0], site.log("join-elder")
    ended = read_status(site, "elder", "Forebear")
    # The page offers no checkpoint that nobody shares now.
    query = f"Checkpoint.objects.filter(digest='{ended['anchor']}').values_list('pk', flat=True)"
    code = f"from coordinator.telemetry.models import Checkpoint; print(*{query})"
    checkpoint = wait_until(lambda: site.manage("shell", "-v", "0", "-c", code), "a checkpoint")
    copy = person.post(f"/runs/{run}/clone/", checkpoint=checkpoint).url.path.split("/")[2]
    person.post(f"/runs/{copy}/launch/")

    heir = site.barnraise("heir", "join", copy, "--threads", "1")
    wait_until(
        lambda: "cannot be had now" in site.log("join-heir"), "the reason why it waits", PATIENCE
    )
    served = site.barnraise("elder", "serve", run)
    wait_until(
        lambda: read_status(site, "heir", "Forebear (copy)").get("validation_first"),
        "its first validation",
        PATIENCE,
    )
    first = read_status(site, "heir", "Forebear (copy)")["validation_first"]
    assert first == [0, pytest.approx(ended["validation_last"][1], abs=0.02)], (
        "it starts with the loss at which the other run ended"
    )
    served.send_signal(signal.SIGINT)
    cousin = site.barnraise("cousin", "join", copy, "--threads", "1")  # fetches them from the heir
    assert heir.wait(PATIENCE) == 0, site.log("join-heir")
    assert cousin.wait(PATIENCE) == 0, site.log("join-cousin")
    last = [read_status(site, machine, "Forebear (copy)") for machine in ("heir", "cousin")]
    assert last[0]["anchor"] == last[1]["anchor"] and last[0]["validation_last"][1] < first[1]
    assert served.wait(PATIENCE) == 0, site.log("serve-elder")
