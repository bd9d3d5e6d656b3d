"""Test that a site heals itself, whatever happens to its processes, and loses and doubles nothing.

A supervised site of its own receives reports and changes while its web server, worker, beat,
Postgres and Valkey are hit, alone and in pairs. A page is open throughout.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import psycopg
import pytest
import redis.exceptions
from helpers.mirrors.chaos_load import (
    TOKENS_A_REPORT,
    HighWaterMarks,
    PageClient,
    Renamer,
    Reporter,
    StormRun,
    create_storm_run,
)
from helpers.mirrors.chaos_plan import TARGETS, Fault, FaultKind, Hit, plan_faults
from helpers.mirrors.chaos_site import ChaosSite
from helpers.quiet_clock import QuietClock
from helpers.wait_for import wait_until

pytestmark = pytest.mark.xdist_group("chaos")

# From the end of the last fault until every part has advanced, by a clock that runs slower on a
# machine that is busy with other things.
HEAL_SECONDS = 10.0
SHORT = {"seed": 2624, "count": 12, "longest_seconds": 3.0}
# Of the seeds tried, one that suspends every process once for more than half a minute.
LONG = {"seed": 2085, "count": 200, "longest_seconds": 60.0}
PATIENCE_SECONDS = 600.0  # of a wait whose length says nothing
ROUND_FAULTS = 10  # of the long test, after which the site must heal


@pytest.fixture(scope="module")
def chaos_site(state) -> Iterator[ChaosSite]:
    folder = Path(tempfile.mkdtemp(prefix="barnraise-chaos-"))
    folder.chmod(0o755)  # where root runs the tests, Postgres has a user of its own
    site = ChaosSite(folder)
    try:
        site.open()
        yield site
    finally:
        site.close()
        shutil.rmtree(folder, ignore_errors=True)


_numbers = count(1)


@pytest.fixture
def storm(chaos_site) -> StormRun:
    return create_storm_run(chaos_site, next(_numbers))


class Load:
    """The reports, the changes and the page of one test."""

    def __init__(self, site: ChaosSite, storm: StormRun):
        self.site = site
        self.storm = storm
        self.clock = QuietClock()
        self.reporters = [Reporter(site, storm, number) for number in range(len(storm.machines))]
        self.renamer = Renamer(site, storm)
        self.page = PageClient(site, storm, self.reporters, self.clock)
        self.heal_seconds: list[float] = []
        with site.database() as cursor:
            cursor.execute("SELECT hlc FROM eventlog_logstate")
            self.first_hlc = cursor.fetchone()[0]  # changes of this test come later

    def start(self) -> None:
        """Start everything, and wait until each part advances."""
        for thread in (*self.reporters, self.renamer, self.page):
            thread.start()
        wait_until(lambda: self.page.is_live, PATIENCE_SECONDS)
        self.wait_until_healed(self.read_marks(), PATIENCE_SECONDS)

    def read_marks(self) -> HighWaterMarks:
        """Read all marks; wait while Postgres or Valkey starts."""
        marks: list[HighWaterMarks] = []

        def read() -> bool:
            try:
                marks.append(HighWaterMarks.read(self.site, self.storm, self.page))
            except (psycopg.Error, redis.exceptions.RedisError):
                return False
            return True

        wait_until(read, PATIENCE_SECONDS)
        return marks[-1]

    def wait_until_healed(self, before: HighWaterMarks, seconds: float) -> None:
        """Wait until every process runs, every mark has advanced and the page is live."""
        started = self.clock.seconds
        standing = ["nothing was looked at"]
        while standing and self.clock.seconds - started < seconds:
            time.sleep(0.1)
            standing = self._find_standing(before)
        assert not standing, f"after {seconds:.0f} s: {standing}\n{self.site.logs()}"

    def _find_standing(self, before: HighWaterMarks) -> list[str]:
        supervisor = self.site.supervisor
        assert not supervisor.failure, supervisor.failure
        down = [name for name in TARGETS if supervisor.running_pid(name) is None]
        if down:
            return down
        try:
            standing = HighWaterMarks.read(self.site, self.storm, self.page).standing_since(before)
        except (psycopg.Error, redis.exceptions.RedisError) as error:
            return [str(error)]
        if not self.page.is_live:
            standing.append(f"the page shows {self.page.line}")
        return standing

    def survive(self, faults: list[Fault]) -> None:
        """Inject faults one after another, and wait until the site has healed."""
        for fault in faults:
            print(f"{time.strftime('%H:%M:%S')} {fault}", flush=True)
            self.site.inject(fault)
        ended = self.clock.seconds
        ended_at = time.monotonic()
        before = self.read_marks()
        self.wait_until_healed(before, HEAL_SECONDS - (self.clock.seconds - ended))
        self.heal_seconds.append(self.clock.seconds - ended)
        print(
            f"healed in {self.heal_seconds[-1]:.1f} s; "
            f"{time.monotonic() - ended_at:.1f} s by the wall",
            flush=True,
        )

    def stop(self) -> None:
        """End the reports and the changes once all that was made is stored."""
        for thread in (*self.reporters, self.renamer):
            thread.ending.set()
        for thread in (*self.reporters, self.renamer):
            thread.join()
        for reporter in self.reporters:
            wait_until(
                lambda each=reporter: each.resend_all() or each.confirmed == each.made,
                PATIENCE_SECONDS,
            )

    def check_counts(self) -> None:
        """Compare what the site has stored with what was sent."""
        expected = sum(reporter.made for reporter in self.reporters)
        members = "membership_id IN (SELECT id FROM fleet_membership WHERE run_id = %s)"
        with self.site.database() as cursor:
            cursor.execute(
                "SELECT count(*), count(DISTINCT (membership_id, seq)) FROM telemetry_losspoint "
                f"WHERE {members}",
                [self.storm.run],
            )
            assert cursor.fetchone() == (expected, expected), "losses were lost or doubled"
            for width in (10, 60, 3600):
                cursor.execute(
                    "SELECT sum(reports), sum(tokens) FROM telemetry_rollup "
                    f"WHERE width = %s AND {members}",
                    [width, self.storm.run],
                )
                assert cursor.fetchone() == (expected, expected * TOKENS_A_REPORT), width
            cursor.execute(
                "SELECT detail->>'name', count(*) FROM audit_auditentry "
                "WHERE action = 'machine.rename' AND subject_id = %s GROUP BY 1",
                [self.storm.renamed],
            )
            names = dict(cursor.fetchall())
            cursor.execute(
                "SELECT count(*) FROM eventlog_logevent"
                " WHERE type = 'machine.describe' AND hlc > %s",
                [self.first_hlc],
            )
            assert cursor.fetchone()[0] == len(names), "one event for each change"
        assert set(self.renamer.accepted) <= set(names), "changes were lost"
        assert set(names.values()) == {1}, "changes were counted twice"
        assert set(names) <= {*self.renamer.accepted, *self.renamer.uncertain}
        assert self.renamer.statuses <= {200, 503}, "a fault is answered with 503"


@contextmanager
def load_on(site: ChaosSite, storm: StormRun) -> Iterator[Load]:
    """Start the load, and end it without a trace."""
    load = Load(site, storm)
    try:
        load.start()
        yield load
        load.stop()
        load.check_counts()
        assert not load.page.wrong, load.page.wrong[:3]
    finally:
        for thread in (*load.reporters, load.renamer):
            thread.ending.set()
        load.page.close()
        load.clock.stop()


def test_every_process_is_started_again_when_it_is_killed(chaos_site):
    supervisor = chaos_site.supervisor
    before = dict(supervisor.restarts)
    pids = {name: supervisor.running_pid(name) for name in TARGETS}
    for name in TARGETS:
        os.kill(pids[name], signal.SIGKILL)
    wait_until(
        lambda: all(supervisor.running_pid(name) not in (None, pids[name]) for name in TARGETS),
        PATIENCE_SECONDS,
    )
    wait_until(chaos_site.is_ready, PATIENCE_SECONDS)
    assert {n: supervisor.restarts[n] - before.get(n, 0) for n in TARGETS} == dict.fromkeys(
        TARGETS, 1
    )
    series = [f'barnraise_restarts_total{{process="{name}"}}' for name in TARGETS]
    wait_until(
        lambda: all(chaos_site.valkey.hget("metrics", name) for name in series), PATIENCE_SECONDS
    )


@pytest.mark.slow
def test_site_survives_twelve_faults_and_loses_nothing(chaos_site, storm):
    faults = plan_faults(**SHORT, kinds=chaos_site.kinds)
    with load_on(chaos_site, storm) as load:
        load.survive(faults)


@pytest.mark.slow
def test_site_survives_two_hundred_faults_on_a_busy_machine(chaos_site, storm):
    """Inject 200 faults, one round of ten after another, and let the site heal after each round.

    The faults last for 12 minutes by themselves: processes are suspended for up to a minute, and
    an embedded server may fail twice a minute before its supervisor rightly gives up. Little of
    that is the processor's time, so that other tests run meanwhile.
    """
    faults = plan_faults(**LONG, kinds=chaos_site.kinds)
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        with load_on(chaos_site, storm) as load:
            for first in range(0, len(faults), ROUND_FAULTS):
                load.survive(faults[first : first + ROUND_FAULTS])
            share = load.page.delayed_lines / load.page.lines
            print(
                f"healed in {max(load.heal_seconds):.1f} s at most; figures were delayed "
                f"{share:.0%} of the time",
                flush=True,
            )
    finally:
        busy.kill()
        busy.wait()


def test_plan_hits_every_process_in_every_way_alone_and_in_pairs():
    faults = plan_faults(**LONG)
    hits = {hit for fault in faults for hit in fault.hits}
    assert hits == {Hit(kind, target) for kind in FaultKind for target in TARGETS}
    assert {len(fault.hits) for fault in faults} == {1, 2}
    assert faults == plan_faults(**LONG) and max(fault.seconds for fault in faults) <= 60.0
    assert {
        hit.target
        for fault in faults
        for hit in fault.hits
        if hit.kind is FaultKind.STOP and fault.seconds > 30.0
    } == set(TARGETS)
    few = [hit for fault in plan_faults(**SHORT) for hit in fault.hits]
    assert {hit.kind for hit in few} == set(FaultKind)
    assert {hit.target for hit in few} == set(TARGETS)
