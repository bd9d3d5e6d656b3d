"""Machines form a crew with a code, and train the run together; no coordinator answers."""

import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from example_hardware import cpu_machine

import barnraise
from barnraise.errors import CrewError
from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import Limits
from barnraise.spec import ModelSpec
from barnraise.training.crew import crew_gathering, crew_joining
from barnraise.training.crew.crew_code import CrewCode, parse_code
from barnraise.training.crew.crew_membership import CrewMembership
from barnraise.training.crew.crew_status import read_crew_status
from barnraise.training.crew.crew_worker import CrewOptions, CrewWorker, describe_request, form_crew
from barnraise.training.local_status import LocalStatus

MODEL = ModelSpec(layers=4, width=32, heads=2, context=32, vocabulary=256)
# So slow that the planner gives every machine a part, although their lines seem slow.
SLOW_MACHINE = cpu_machine(cores=1, disk=8 << 30, matmul=((768, 1e6),), attention=1e6)
FAST_MACHINE = cpu_machine(cores=1, disk=8 << 30)


class CrewDrill:
    """A lead and members, each in a thread.

    Attributes:
        codes: what the lead has printed.
        seatings: what the forming returned.
        failures: what threads have raised, by machine.
        lead: the lead's worker, once it trains.
    """

    def __init__(self, run, options: CrewOptions, hardware: Hardware = SLOW_MACHINE):
        self.run, self.options, self.hardware = run, options, hardware
        self.codes: list[str] = []
        self.seatings: list[object] = []
        self.failures: dict[str, BaseException] = {}
        self.stopping = threading.Event()
        self.members_stopping: dict[str, threading.Event] = {}
        self.lead: CrewWorker | None = None
        self.threads: dict[str, threading.Thread] = {}
        self.lead_status: dict[str, Any] = {}

    def show(self, status: LocalStatus) -> None:
        """Store the lead's last status."""
        self.lead_status = status.model_dump(mode="json")

    def start(self, name: str, work) -> None:
        """Run something in a thread under a machine's name."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                traceback.print_exc()
                self.failures[name] = error

        self.threads[name] = threading.Thread(target=run, name=name)
        self.threads[name].start()

    def start_lead(self, trains: bool = True) -> str:
        """Start the lead; return its code."""
        joined = self.run.join("lead")
        request = describe_request(joined, self.hardware, Limits())
        key = joined.coordinator.identity.key

        def lead() -> None:
            seating = form_crew(
                joined,
                request,
                self.options,
                self.run.network.transport(key),
                self.stopping.is_set,
                self.codes.append,
            )
            self.seatings.append(seating)
            if seating is None or not trains:
                joined.folder.close()
                return
            machine = (self.hardware, Limits())
            transport = self.run.network.transport(key)
            self.lead = CrewWorker(seating, joined, self.stopping, machine, self.show, transport)
            self.lead.run()

        self.start("lead", lead)
        self.until(lambda: self.codes)
        return self.codes[0]

    def start_member(self, name: str, code: CrewCode) -> Path:
        """Start a member; return its run's folder."""
        joined = self.run.join(name, with_text=False)
        request = describe_request(joined, self.hardware, Limits())
        transport = self.run.network.transport(joined.coordinator.identity.key)
        membership = CrewMembership(joined, code, name, request)
        stopping = self.members_stopping[name] = threading.Event()
        self.start(name, lambda: membership.run(transport, stopping.is_set))
        return joined.folder.path

    def stop_member(self, name: str) -> None:
        """End a member; it saves nothing more, as if it were killed."""
        self.members_stopping[name].set()
        self.threads[name].join(60)

    def until(self, condition, seconds: float = 60.0) -> None:
        """Wait until something holds."""
        ends_at = time.monotonic() + seconds
        while not condition():
            if "lead" in self.failures:
                raise self.failures["lead"]
            assert time.monotonic() < ends_at, f"it does not hold: {self.failures}"
            time.sleep(0.05)

    def end(self) -> None:
        """Stop the lead, then the members, and wait for them."""
        self.stopping.set()
        if "lead" in self.threads:
            self.threads["lead"].join(60)
        for stopping in self.members_stopping.values():
            stopping.set()
        for thread in self.threads.values():
            thread.join(60)


@pytest.fixture
def drill(swarm, monkeypatch):
    monkeypatch.setattr(crew_joining, "REDIAL_SECONDS", 0.1)
    drills: list[CrewDrill] = []

    def create(run=None, hardware=SLOW_MACHINE, **options) -> CrewDrill:
        run = run or swarm(MODEL, token_budget=8_000, evaluate_every=4_000)
        drills.append(CrewDrill(run, CrewOptions(**options), hardware))
        return drills[-1]

    yield create
    for each in drills:
        each.end()


def test_crew_of_three_forms_trains_and_ends_with_its_run(drill):
    crew = drill(members=2)
    code = parse_code(crew.start_lead())
    folders = [crew.start_member(name, code) for name in ("ada", "ben")]
    crew.until(lambda: crew.lead is not None and crew.lead.metrics.step > 5)
    seats = crew.seatings[0].seats
    assert sorted(seat.name for seat in seats) == ["ada", "ben", "the lead"]
    assert sum(seat.blocks for seat in seats) == MODEL.layers
    crew.until(lambda: all(seat.connected for seat in read_crew_status(folders[0]).seats))
    status = read_crew_status(folders[0])
    assert status.number > 0 and len(status.seats) == 3
    crew.threads["lead"].join(120)  # the run's budget is spent
    assert not crew.failures, crew.failures
    head = crew.lead.ledger.head(crew.lead.exchange.author.name)
    assert {share.key for share in head.crew} == {seat.key for seat in seats[1:]}
    reported = crew.lead_status["crew"]
    assert [(seat["key"], seat["blocks"]) for seat in reported] == [
        (seat.key[:16], seat.blocks) for seat in seats
    ]
    stated = sum(share.tokens for share in head.crew) / head.total
    assert stated == pytest.approx(sum(seat["share"] for seat in reported[1:]), abs=0.01)
    first, last = crew.lead_status["validation_first"], crew.lead_status["validation_last"]
    assert last[0] >= 8_000 and last[1] < first[1] - 0.2
    for name in ("ada", "ben"):
        crew.threads[name].join(30)
        assert not crew.threads[name].is_alive(), "a member ends with its lead"


def test_member_that_restarts_comes_back_with_the_round_that_it_saved(drill, swarm, caplog):
    caplog.set_level("INFO")
    crew = drill(swarm(MODEL, token_budget=60_000, evaluate_every=20_000), members=2)
    code = parse_code(crew.start_lead())
    for name in ("ada", "ben"):
        crew.start_member(name, code)
    crew.until(lambda: read_label(crew.lead) > 1)
    crew.start_member("eve", code)
    crew.until(lambda: "eve" in crew.failures)
    assert "this crew already trains" in str(crew.failures.pop("eve"))
    crew.stop_member("ada")
    label = crew.lead.engine.progress.label
    crew.start_member("ada", code)
    crew.until(lambda: "the crew begins again at its last saved round" in caplog.text)
    crew.until(lambda: "ada is back in the crew" in caplog.text)
    crew.until(lambda: caplog.text.count("the crew is connected") == 2)
    crew.until(lambda: read_label(crew.lead) > label + 1)
    assert not crew.failures, crew.failures
    assert "has not saved its part" not in caplog.text


def read_label(worker: CrewWorker) -> int:
    """Return how often a crew has saved its state; 0 while its lead has no engine."""
    engine = getattr(worker, "engine", None)
    return engine.progress.label if engine is not None else 0


def test_machine_that_would_slow_the_crew_down_is_told_so(drill):
    crew = drill(hardware=FAST_MACHINE, members=2)
    code = parse_code(crew.start_lead(trains=False))
    for name in ("ada", "ben"):
        crew.start_member(name, code)
    crew.until(lambda: crew.seatings and crew.failures)
    assert len(crew.seatings[0].seats) == 2
    assert "the crew is faster without this machine" in str(*crew.failures.values())


def test_machine_with_another_code_is_refused(drill):
    crew = drill(members=1)
    code = parse_code(crew.start_lead(trains=False))
    crew.start_member("eve", replace(code, secret=bytes(16)))
    crew.until(lambda: "eve" in crew.failures)
    assert "the code is not that of this crew" in str(crew.failures["eve"])
    assert isinstance(crew.failures["eve"], CrewError)
    crew.start_member("ada", code)
    crew.until(lambda: crew.seatings)
    assert [seat.name for seat in crew.seatings[0].seats] == ["the lead", "ada"]


def test_machine_with_another_version_is_refused(drill, monkeypatch):
    crew = drill(members=1)
    code = parse_code(crew.start_lead(trains=False))
    monkeypatch.setattr(crew_joining, "__version__", "0.0.1")
    crew.start_member("ada", code)
    crew.until(lambda: "ada" in crew.failures)
    sentence = str(crew.failures["ada"])
    assert f"it has version 0.0.1 of barnraise, and the lead {barnraise.__version__}" in sentence


def test_machine_with_another_spec_is_refused(drill, swarm):
    run = swarm(MODEL)
    crew = drill(run, members=1)
    code = parse_code(crew.start_lead(trains=False))
    run.spec = replace(run.spec, seed=8)
    crew.start_member("ada", code)
    crew.until(lambda: "ada" in crew.failures or len(crew.codes) > 1, seconds=30)
    assert "spec" in str(crew.failures["ada"])


def test_seventeenth_machine_is_refused(drill, monkeypatch):
    monkeypatch.setattr(crew_gathering, "MAX_MEMBERS", 2)
    crew = drill(members=2)
    code = parse_code(crew.start_lead(trains=False))
    crew.start_member("ada", code)
    crew.until(lambda: read_names(crew) == ["ada"])
    crew.start_member("ben", code)
    crew.until(lambda: "ben" in crew.failures)
    assert "the crew has 2 machines, which is the most" in str(crew.failures["ben"])


def read_names(crew: CrewDrill) -> list[str]:
    """Return the names of the members that run and have not failed."""
    return [name for name in crew.threads if name not in ("lead", *crew.failures)]


def test_lead_that_stops_waiting_tells_the_members(drill):
    crew = drill(members=5)
    code = parse_code(crew.start_lead(trains=False))
    crew.start_member("ada", code)
    time.sleep(2)
    crew.stopping.set()
    crew.until(lambda: crew.seatings)
    assert crew.seatings == [None]


@pytest.mark.parametrize(
    ("others", "wanted", "fits", "quiet", "complete"),
    [
        (2, 2, False, 0.0, True),  # the planner then says what is missing
        (1, 2, True, 1e6, False),
        (3, None, True, 19.0, False),
        (3, None, True, 21.0, True),
        (3, None, False, 1e6, False),
    ],
)
def test_crew_begins_when_it_is_complete(others, wanted, fits, quiet, complete):
    assert crew_gathering.is_complete(others, wanted, fits, quiet) is complete


def test_line_is_guessed_by_the_address():
    assert crew_gathering.guess_line("192.168.1.5:4433") is crew_gathering.LAN_LINE
    assert crew_gathering.guess_line("[fd00::1]:4433") is crew_gathering.LAN_LINE
    assert crew_gathering.guess_line("203.0.114.7:4433") is crew_gathering.HOME_LINE
    assert crew_gathering.guess_line("memory:0123") is crew_gathering.HOME_LINE
