"""Machines that train with Muon over real sockets reach a lower loss than with AdamW."""

import json
from typing import Any

import pytest
from helpers.site.live_site import Person, Site

MACHINES = ("muon-one", "muon-two", "muon-three", "muon-four")
TOKENS = 250_000
MODEL = ("model.layers=2", "model.width=64", "model.heads=2", "model.context=64")
# The demo's text and rate; for Muon what forms offer with it.
RECIPES = {
    "adamw": ("recipe.learning_rate=2e-3",),
    "muon": ("recipe.optimizer=muon", "recipe.learning_rate=4e-3", "recipe.matrix_rate=0.01"),
}


@pytest.mark.slow
def test_four_machines_with_muon_end_lower_than_with_adamw(site: Site):
    person = Person(site)
    for machine in MACHINES:
        person.enrol(machine)
    losses = {optimizer: train(site, optimizer) for optimizer in RECIPES}
    assert losses["muon"] < 0.97 * losses["adamw"], losses


def train(site: Site, optimizer: str) -> float:
    """Train a run on four machines, and return the loss at its end."""
    settings = (*MODEL, *RECIPES[optimizer], "text.tokenizer=bytes")
    run = site.launch_run(f"With {optimizer}", TOKENS, *settings, quorum=len(MACHINES))
    joined = [site.barnraise(machine, "join", run, "--threads", "1") for machine in MACHINES]
    for machine, process in zip(MACHINES, joined, strict=True):
        assert process.wait(900) == 0, site.log(f"join-{machine}")
    ends = [read_end(site, machine) for machine in MACHINES]
    assert len({(end["vector"], end["anchor"]) for end in ends}) == 1, ends
    return max(end["validation_last"] for end in ends)[1]  # [tokens, loss]


def read_end(site: Site, machine: str) -> dict[str, Any]:
    """Return the last status of a machine's newest run."""
    folders = sorted(
        (site.folder / machine / "runs").glob("*/status.json"), key=lambda f: f.stat().st_mtime
    )
    return json.loads(folders[-1].read_text())
