"""A run's weights after its end: served by one that trained, fetched by one that did not, held against their digest."""

import re
import signal

import pytest
from live_site import Person, Site, until


@pytest.fixture
def person(site: Site) -> Person:
    return Person(site)


def enrol(site: Site, person: Person, machine: str) -> None:
    login = site.barnraise(machine, "login", site.url, "--name", machine)
    where = re.compile(r"http://[^/]+(/machines/enrol/\S+/)")
    until(lambda: where.search(site.log(f"login-{machine}")), "a code to approve")
    person.post(where.search(site.log(f"login-{machine}"))[1], answer="approve")
    assert login.wait(60) == 0, site.log(f"login-{machine}")


def test_a_finished_runs_weights_are_served_and_fetched_and_are_those_the_site_lists(site, person):
    owner = ("--owner", "organiser@example.org", "--name", "Keepsake", "--report-every", "1", "--launch")
    budget = ("--tokens", "60000", "--set", "recipe.learning_rate=3e-3", "--set", "text.tokenizer=bytes")
    run = site.manage("create_run", *owner, *budget).splitlines()[-1]
    for machine in ("keeper", "guest"):
        enrol(site, person, machine)
    trained = site.barnraise("keeper", "join", run, "--threads", "1")
    assert trained.wait(200) == 0, site.log("join-keeper")
    anchor = site.status("keeper")["anchor"]
    page = until(lambda: (text := person.http.get(f"/runs/{run}/").text) and anchor in text and text, "a checkpoint")
    assert "barnraise serve" in page or "barnraise export" in page
    model = site.folder / "model"
    alone = site.barnraise("guest", "fetch", run, str(model))
    assert alone.wait(200) == 1 and "try again later" in site.log("fetch-guest")

    served = site.barnraise("keeper", "serve", run)
    until(lambda: "Serving" in site.log("serve-keeper"), "serving", 90)
    fetched = site.barnraise("guest", "fetch", run, str(model), "--digest", anchor)
    assert fetched.wait(200) == 0, site.log("fetch-guest")
    assert anchor in site.log("fetch-guest") and (model / "config.json").exists()
    wrong = site.barnraise("guest", "fetch", run, str(model), "--digest", "0" * 64)
    assert wrong.wait(200) == 1 and "you asked for" in site.log("fetch-guest")
    served.send_signal(signal.SIGINT)
    assert served.wait(60) == 0, site.log("serve-keeper")
