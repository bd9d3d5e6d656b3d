"""Tests of the length of rounds on a simulated line: it is never busy for more than its share."""

import math
from collections import Counter
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from barnraise.exchange.updates.update_sender import UpdateTraffic
from barnraise.exchange.weights.peer_estimates import SteadyValue
from barnraise.planning.round_schedule import RoundSchedule, align_with_peers, fit_to_uplink
from barnraise.planning.uplink_budget import UPDATE_SHARE, UplinkUse
from barnraise.spec import Recipe

PARAMETERS = 640_000
MACHINES = 16
STEP_SECONDS = 0.05
TICK = 0.25  # seconds
FAST = 5.6e6  # bytes per second of a carrier


@dataclass
class Load:
    """What others need of a line.

    Attributes:
        pushed: copies of each own update that leave before all else.
        requested: further copies of it, in turn with relayed updates.
        relayed: bytes per second of others' updates.
        has_carrier: whether the only copy goes to a carrier.
    """

    pushed: float = 1.0
    requested: float = 0.0
    relayed: float = 0.0
    has_carrier: bool = False

    @property
    def copies(self) -> float:
        return self.pushed + self.requested


@dataclass
class Line:
    """A machine on a line, which plans its rounds as the exchange does.

    Attributes:
        uplink: bytes per second.
        now: the time in seconds.
        shares: of the line that were sent between one update and the next.
        schedules: of the rounds.
    """

    uplink: float
    now: float = 1000.3
    shares: list[float] = field(default_factory=list)
    schedules: list[RoundSchedule] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._traffic, self._steady = UpdateTraffic(), SteadyValue()
        self._queues: Counter[str] = Counter()
        self._sent = 0.0
        self._published_at = self.now

    def use(self, load: Load) -> UplinkUse:
        carrier = FAST if load.has_carrier else math.inf
        return self._traffic.use(self.uplink, MACHINES - 1, carrier)

    def plan(self, load: Load) -> None:
        update_rate = self._steady.update(self.use(load).update_rate)
        alone = fit_to_uplink(update_rate, STEP_SECONDS, PARAMETERS)
        self.schedules.append(
            align_with_peers(Recipe(codec="auto"), alone, STEP_SECONDS, STEP_SECONDS, self.now)
        )

    def run(self, load: Load, rounds: int) -> None:
        """Publish some rounds."""
        if not self.schedules:
            self.plan(load)
        end = len(self.schedules) + rounds
        while len(self.schedules) < end:
            self.now += TICK
            self._send(load)
            is_free = self.now >= self._traffic.free_at(self.use(load))
            if self.now >= self.schedules[-1].ends_at and is_free:
                self._publish(load)

    def _send(self, load: Load) -> None:
        room = self.uplink * TICK
        self._queues["relayed"] += load.relayed * TICK
        for kinds in (("pushed",), ("requested", "relayed")):
            waiting = sum(self._queues[kind] for kind in kinds)
            for kind in kinds if waiting else ():
                size = self._queues[kind] * min(1.0, room / waiting)
                self._queues[kind] -= size
                self._sent += size
                self._traffic.on_sent(size, kind != "relayed")
            room -= min(room, waiting)

    def _publish(self, load: Load) -> None:
        size = self.schedules[-1].scheme.payload_size(PARAMETERS)
        seconds = self.now - self._published_at
        self.shares.append(self._sent / (self.uplink * seconds))
        self._sent, self._published_at = 0.0, self.now
        self._traffic.on_published(size, self.now, load.has_carrier)
        for kind in ("pushed", "requested"):
            self._queues[kind] += getattr(load, kind) * size
        self.plan(load)


UPLINKS = st.floats(2e4, 2e6)
COPIES = st.floats(0.0, 14.0)


def load_of(uplink: float, pushed: float, requested: float, relayed_share: float) -> Load:
    """Return a load that a line among alike ones can have: R − 1 copies at most."""
    most = (MACHINES - 1) * (1 - relayed_share / UPDATE_SHARE)
    pushed = min(pushed, most)
    return Load(pushed, min(requested, most - pushed), relayed_share * uplink)


LOADS = st.tuples(st.floats(1.0, 14.0), COPIES, st.floats(0.0, 0.4))


def check_pace(line: Line, first: int) -> None:
    """Check the rounds from `first` on: the line is not too busy, and they are alike."""
    assert max(line.shares[first:]) <= 1.05 * UPDATE_SHARE, line.shares
    periods = {schedule.period for schedule in line.schedules[first:]}
    assert max(periods) <= 2 * min(periods), periods


@settings(deadline=None, max_examples=50)
@given(UPLINKS, LOADS)
def test_line_is_busy_for_its_share_from_the_first_rounds_on(uplink, load):
    line = Line(uplink)
    line.run(load_of(uplink, *load), 16)
    check_pace(line, 8)
    own = line.shares[1:3]
    assert max(own) <= UPDATE_SHARE + load[2], "even before others' updates are measured"


@settings(deadline=None, max_examples=50)
@given(UPLINKS, LOADS, st.floats(0.0, 3.0))
def test_carrier_that_comes_and_goes_leaves_no_backlog(uplink, load, requested):
    tree, line = load_of(uplink, *load), Line(uplink)
    carried = Load(1.0, requested, 0.0, has_carrier=True)
    line.run(tree, 8)
    for _ in range(2):
        line.run(carried, 12)
        check_pace(line, len(line.shares) - 6)
        before = len(line.shares)
        line.run(tree, 12)
        check_pace(line, len(line.shares) - 6)
        least = tree.copies * line.schedules[-1].scheme.payload_size(PARAMETERS) / uplink
        assert max(schedule.period for schedule in line.schedules[before : before + 3]) >= least


@pytest.mark.parametrize("copies", [1.0, 14.0])
def test_line_without_a_limit_changes_nothing(copies):
    traffic = UpdateTraffic()
    for number in range(5):
        traffic.on_published(1000, float(number))
        traffic.on_sent(copies * 1000, is_own=True)
        assert traffic.free_at(UplinkUse(math.inf, machines=MACHINES)) == number
