"""A run that a machine cannot join is refused at once, before the machine is measured."""

import time

import pytest
from helpers.site.live_site import Person, Site

CANCEL = "from coordinator.runs.models import Run; assert Run.objects.find({slug!r}).cancel()"
# Asked for are 2 seconds on an idle computer, start of Python included; tests share theirs.
MAX_SECONDS = 60.0


@pytest.mark.slow
def test_unknown_and_ended_runs_are_refused_within_seconds(site: Site):
    person = Person(site)
    person.enrol("lean-to")
    ended = site.launch_run("Ended early", 100_000)
    site.manage("shell", "-v", "0", "-c", CANCEL.format(slug=ended))
    for run, reason in (("nosuchrun", "nosuchrun"), (ended, "was cancelled by its owner")):
        started = time.monotonic()
        joined = site.barnraise("lean-to", "join", run)
        assert joined.wait(MAX_SECONDS) != 0
        seconds = time.monotonic() - started
        print(f"join {run} was refused after {seconds:.2f} s")
        log = site.log("join-lean-to")
        assert reason in log, log
        assert "Measuring" not in log and "Traceback" not in log
