"""Reports become rarer while requests wait at the site, and frequent again, without oscillation."""

import heapq
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.protocol.coordinator_messages import Directive
from barnraise.protocol.signing import open_signed
from coordinator.api import worker_endpoints
from coordinator.fleet.models import Membership
from coordinator.lib.request_delay import RequestDelay
from coordinator.runs.drafts import NewRun
from coordinator.telemetry import report_pace
from coordinator.telemetry.rollup import drain_queue
from coordinator.telemetry.run_table import machine_rows
from coordinator.telemetry.site_capacity import bearable_machines

STRETCHES = st.floats(1.0, report_pace.MAX_STRETCH)
DELAYS = st.tuples(*[st.floats(0.0, 1e6)] * 2)
SECONDS = st.floats(0.0, 1e6)


@given(stretch=STRETCHES, delays=DELAYS, seconds=SECONDS)
def test_stretch_is_bounded_and_moves_only_as_both_delays_say(stretch, delays, seconds):
    after = report_pace.next_stretch(stretch, delays, seconds)
    assert 1.0 <= after <= report_pace.MAX_STRETCH
    if after > stretch:
        assert min(delays) > 0.025
    if after < stretch:
        assert max(delays) < 0.008
    assert report_pace.next_stretch(stretch, (delays[0], 0.0), seconds) <= stretch, (
        "a burst changes nothing"
    )


@given(every=st.floats(0.2, 3600.0), stretch=STRETCHES, spread=st.floats(0.0, 1.0))
def test_interval_is_the_runs_own_or_longer_and_one_that_workers_accept(every, stretch, spread):
    interval = report_pace.stretch_interval(every, stretch, spread)
    assert every <= interval <= max(every, report_pace.LONGEST_INTERVAL_SECONDS)
    assert report_pace.stretch_interval(every, 1.0, spread) == every
    run = machine = "01890000-0000-7000-8000-000000000001"
    fields = {"run": run, "machine": machine, "status": "training", "issued": 0.0}
    assert Directive(**fields, report_every=interval).report_every == interval


class Simulation:
    """A process that serves one report after the other, and workers that obey its answers."""

    def __init__(self, workers: int, service_seconds: float, every: float = 10.0) -> None:
        chance = random.Random(7)
        self.now = 0.0
        self.every = every
        self.service_seconds = service_seconds
        self.free_at = 0.0
        self.delay = RequestDelay()
        self.pace = report_pace.ReportPace(self.delay, lambda: self.now, chance.random)
        self.due = [(every * chance.random(), n) for n in range(workers)]
        heapq.heapify(self.due)

    def run(self, seconds: float) -> tuple[list[float], list[float]]:
        """Let time pass; return the delays of the reports and the intervals they were answered."""
        end, delays, intervals = self.now + seconds, [], []
        while self.due[0][0] < end:
            arrived, worker = heapq.heappop(self.due)
            self.now = max(arrived, self.free_at)
            self.free_at = self.now + self.service_seconds
            self.delay.record(self.now - arrived)
            delays.append(self.now - arrived)
            intervals.append(self.pace.choose_interval(self.every))
            heapq.heappush(self.due, (self.free_at + intervals[-1], worker))
        self.now = end
        return delays, intervals


def test_site_without_load_answers_the_runs_own_interval():
    delays, intervals = Simulation(workers=100, service_seconds=0.01).run(600)
    assert set(intervals) == {10.0} and max(delays) < 1.0


@pytest.mark.parametrize(
    ("workers", "service_seconds"), [(1_500, 0.01), (2_000, 0.01), (4_000, 0.01), (20_000, 0.0025)]
)
def test_overloaded_site_recovers_and_does_not_oscillate(workers, service_seconds):
    site = Simulation(workers, service_seconds)  # 100 reports a second at most, or 400
    site.run(300)
    means = []
    for _ in range(20):
        delays, intervals = site.run(60)
        assert sorted(delays)[int(0.99 * len(delays))] < 0.25
        means.append(sum(intervals) / len(intervals))
    assert min(means) > workers * service_seconds * 0.9
    assert all(0.8 < after / before < 1.25 for before, after in pairwise(means)), means


@pytest.mark.parametrize("service_seconds", [0.005, 0.03])  # a post; with all that else waits
def test_most_machines_of_one_run_report_less_often_by_themselves(service_seconds):
    processes = 20
    machines = bearable_machines(processes)
    assert machines == 20_000
    site = Simulation(machines // processes, service_seconds, NewRun.report_every)
    site.run(300)
    delays, intervals = site.run(600)
    assert sorted(delays)[int(0.99 * len(delays))] < 0.25
    mean = sum(intervals) / len(intervals)
    needed = machines / processes * service_seconds
    assert needed < mean < report_pace.LONGEST_INTERVAL_SECONDS


def test_intervals_return_after_the_load():
    site = Simulation(2_000, service_seconds=0.01)
    site.run(120)
    site.service_seconds = 0.0001
    _, intervals = site.run(1_200)
    assert intervals[-1] == 10.0


def test_machine_that_obeys_a_long_interval_is_not_taken_for_gone(
    adas_run, numbered_report, monkeypatch
):
    run, machine = adas_run
    monkeypatch.setattr(worker_endpoints.report_pace, "choose_interval", lambda every: 60.0)
    reply = machine.report(run, numbered_report(1)).json()
    signed = worker_endpoints.messages.Signed.model_validate(reply["directive"])
    assert open_signed(signed, "directive", Directive).report_every == 60.0
    (row,) = machine_rows(run)
    seen = row["last_seen"]
    (row,) = machine_rows(run, seen + 150)
    assert row["alive"], "two reports may be missed"
    (row,) = machine_rows(run, seen + 200)
    assert not row["alive"]
    drain_queue(wait=True)
    member = Membership.objects.get(machine=machine.machine)
    assert member.report_interval == 60.0
