"""Two machines train a Llama over real sockets, one of them from disk, and end with one model."""

import pytest
from helpers.site.live_site import Person, Site

PATIENCE = 600  # seconds; other processes may use the machine that runs the tests
# The model takes 59 MB in memory.
LIMITS = {"roomy": (), "tight": ("--memory", "20MB", "--crash-safety", "exact")}


@pytest.mark.slow  # test_llama_bits.py compares the bits, and test_disk.py trains from disk
def test_two_machines_train_a_llama_one_of_them_from_disk(site: Site):
    person = Person(site)
    settings = ("recipe.learning_rate=3e-3", "recipe.round_steps=5", "recipe.warmup_tokens=2000")
    run = site.launch_run("Alpaca", 30_000, *settings, quorum=2, preset="llama-nano")
    for machine in LIMITS:
        person.enrol(machine)
    processes = {
        machine: site.barnraise(machine, "join", run, "--threads", "1", *options)
        for machine, options in LIMITS.items()
    }
    for machine, process in processes.items():
        assert process.wait(PATIENCE) == 0, site.log(f"join-{machine}")
    roomy, tight = (site.status(machine) for machine in LIMITS)
    assert (roomy["vector"], roomy["anchor"]) == (tight["vector"], tight["anchor"])
    assert "disk" in tight["plan"]["sentence"] and "disk" not in roomy["plan"]["sentence"]
    assert min(roomy["updates_sent"], tight["updates_sent"]) > 0
    assert roomy["validation_last"][1] < roomy["validation_first"][1] - 0.5, "the loss must fall"
