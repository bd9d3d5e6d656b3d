"""Machines form a crew with a code, and train the run together; no coordinator answers."""

import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from example_hardware import cpu_machine
from helpers.network.routers import PcpMappings, Router

import barnraise
from barnraise.errors import CrewError
from barnraise.exchange.exchange import Exchange
from barnraise.exchange.snapshots import snapshot_client
from barnraise.peering.addresses import port_mapping
from barnraise.peering.addresses.port_mapping import PortMappingTimes
from barnraise.peering.transports.iroh_transport import (
    ANY_HOST,
    IrohTransport,
    find_free_port,
    wait_until_free,
)
from barnraise.peering.transports.tls_endpoint import TlsEndpoint
from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import Limits
from barnraise.spec import ModelSpec
from barnraise.state_dir import StateDir
from barnraise.training.crew import (
    crew_engine,
    crew_gathering,
    crew_joining,
    crew_member,
    crew_membership,
    crew_orders,
    crew_worker,
    step_protocol,
)
from barnraise.training.crew.crew_code import CrewCode, parse_code
from barnraise.training.crew.crew_membership import CrewMembership
from barnraise.training.crew.crew_status import read_crew_status
from barnraise.training.crew.crew_worker import CrewOptions, CrewWorker, describe_request, form_crew
from barnraise.training.local_control import LocalControl
from barnraise.training.local_status import LocalStatus
from barnraise.training.prefetch import Prefetch

MODEL = ModelSpec(layers=4, width=32, heads=2, context=32, vocabulary=256)
# So slow that the planner gives every machine a part, although their lines seem slow.
SLOW_MACHINE = cpu_machine(cores=1, disk=8 << 30, matmul=((768, 1e6),), attention=1e6)
FAST_MACHINE = cpu_machine(cores=1, disk=8 << 30)


class Killed(BaseException):
    """Raised in a lead's thread between two steps, in place of a power failure."""


class SocketNetwork:
    """Transports over real sockets, for the machines whose homes are in a folder."""

    def __init__(self, folder: Path, host: str = "127.0.0.1"):
        self._folder, self._host = folder, host
        self._ports: dict[str, int] = {}

    def transport(self, key: str) -> IrohTransport:
        """Return a transport for the machine with this key, always at the same port."""
        port = self._ports.setdefault(key, find_free_port())
        wait_until_free(port)
        identities = [StateDir(path).identity for path in self._folder.iterdir()]
        secret = next(each.secret for each in identities if each.key == key)
        return IrohTransport(secret, self._host, port=port)


class CrewDrill:
    """A lead and members, each in a thread.

    Attributes:
        codes: what the lead has printed.
        crews: what the forming returned.
        failures: what threads have raised, by machine.
        heirs: the members that are to lead in a lost lead's place.
        killing: set to end the lead between two steps; it says nothing to its members.
        lead: the lead's worker, once it trains.
    """

    def __init__(self, run, options: CrewOptions, hardware: Hardware = SLOW_MACHINE):
        self.run, self.options, self.hardware = run, options, hardware
        self.limits = Limits()  # of the lead's owner while the crew forms
        self.codes: list[str] = []
        self.crews: list[Any] = []
        self.failures: dict[str, BaseException] = {}
        self.stopping = threading.Event()
        self.members_stopping: dict[str, threading.Event] = {}
        self.members_pausing: dict[str, threading.Event] = {}
        self.heirs: list[str] = []
        self.killing = threading.Event()
        self.lead: CrewWorker | None = None
        self.threads: dict[str, threading.Thread] = {}
        self.lead_status: dict[str, Any] = {}

    def show(self, status: LocalStatus) -> None:
        """Store the lead's last status."""
        self.lead_status = status.model_dump(mode="json")
        if self.killing.is_set():
            raise Killed

    def start(self, name: str, work) -> None:
        """Run something in a thread under a machine's name."""

        def run() -> None:
            try:
                work()
            except Killed:
                return
            except BaseException as error:
                traceback.print_exc()
                self.failures[name] = error

        self.threads[name] = threading.Thread(target=run, name=name)
        self.threads[name].start()

    def start_lead(self, trains: bool = True, name: str = "lead", **part: Any) -> str:
        """Start the lead on the machine of a name, as `Swarm.join` does; return its code."""
        count = len(self.codes)
        joined = self.run.join(name, **part)
        request = describe_request(joined, self.hardware, self.limits)
        key = joined.coordinator.identity.key

        def lead() -> None:
            formed = form_crew(
                joined,
                request,
                self.options,
                self.run.network.transport(key),
                self.stopping.is_set,
                self.codes.append,
            )
            self.crews.append(formed)
            if formed is None or not trains:
                joined.folder.close()
                return
            machine = (self.hardware, Limits())
            transport = self.run.network.transport(key)
            self.lead = CrewWorker(formed, joined, self.stopping, machine, self.show, transport)
            self.lead.run()

        self.start("lead", lead)
        self.until(lambda: len(self.codes) > count)
        return self.codes[-1]

    def gather(self, *names: str) -> CrewCode:
        """Start the lead and members; return the crew's code."""
        code = parse_code(self.start_lead())
        for name in names:
            self.start_member(name, code)
        return code

    def start_member(self, name: str, code: CrewCode, hardware: Hardware | None = None) -> Path:
        """Start a member on the drill's hardware or another; return its run's folder."""
        joined = self.run.join(name, with_text=False)
        request = describe_request(joined, hardware or self.hardware, Limits())
        transport = self.run.network.transport(joined.coordinator.identity.key)
        pausing = self.members_pausing[name] = threading.Event()
        membership = CrewMembership(joined, code, name, request, pausing.is_set)
        stopping = self.members_stopping[name] = threading.Event()

        def work() -> None:
            if membership.run(transport, stopping.is_set):
                self.heirs.append(name)

        self.start(name, work)
        return joined.folder.path

    def kill_lead(self, monkeypatch) -> None:
        """End the lead between two steps."""
        with monkeypatch.context() as patch:
            patch.setattr(crew_orders.CrewOrders, "announce", lambda orders, task: None)
            self.killing.set()
            self.threads["lead"].join(60)
        self.killing.clear()
        self.lead = None

    def stop_member(self, name: str) -> None:
        """End a member; it saves nothing more, as if it were killed."""
        self.members_stopping[name].set()
        self.threads[name].join(60)

    def until_saved(self, times: int) -> None:
        """Wait until the crew has saved its state, and then so often again."""
        labels: set[int] = set()

        def has_saved() -> bool:
            labels.add(read_label(self.lead))
            return len(labels - {0}) > times

        self.until(has_saved)

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
    seats = crew.crews[0].seating.seats
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
    code = crew.gather("ada", "ben")
    crew.until_saved(1)
    crew.start_member("eve", replace(code, secret=bytes(16)))
    crew.until(lambda: "eve" in crew.failures)
    assert "copy the code that the lead prints now" in str(crew.failures.pop("eve"))
    crew.stop_member("ada")
    crew.start_member("ada", code)
    crew.until(lambda: "the crew begins again at its last saved round" in caplog.text)
    crew.until(lambda: "ada is back in the crew" in caplog.text)
    crew.until(lambda: caplog.text.count("the crew is connected") == 2)
    crew.until_saved(2)
    assert not crew.failures, crew.failures
    assert "has not saved its part" not in caplog.text


def test_crew_goes_on_without_a_member_and_with_it_again(drill, swarm, caplog, monkeypatch):
    caplog.set_level("INFO")
    be_impatient(monkeypatch)
    crew = drill(swarm(MODEL, token_budget=150_000, evaluate_every=50_000), members=2)
    code = crew.gather("ada", "ben")
    crew.until_saved(1)
    for change, names in ((crew.stop_member, {"ben"}), (crew.start_member, {"ada", "ben"})):
        change("ada", *[code] * (change == crew.start_member))
        crew.until(lambda names=names: read_members(crew) == names)
        crew.until_saved(2)
    assert not crew.failures, crew.failures
    assert "ada of this crew is gone" in caplog.text or "ada has no channel" in caplog.text
    assert "dealing the blocks again, with 1 more machine\n" in caplog.text
    assert "without Adam's moments" in caplog.text, "what ada held had to be rebuilt"


def test_block_moves_from_a_machine_that_has_become_slow(drill, swarm, caplog, monkeypatch):
    caplog.set_level("INFO")
    crew = drill(swarm(MODEL, token_budget=150_000, evaluate_every=50_000), members=1)
    pop_stage_seconds = crew_engine.CrewEngine.pop_stage_seconds

    def pop_slowed(engine):
        """Measure the planner's seconds, and ten times as many on the machine with most blocks."""
        steps, stages = pop_stage_seconds(engine), crew.lead.crew.plan.deal.stages
        seconds = [stage.price.step_seconds for stage in stages]
        seconds[max(range(len(stages)), key=lambda n: stages[n].blocks)] *= 10
        assert all(set(step) == {0, 1} for step in steps)
        return [dict(enumerate(seconds))] * len(steps)

    monkeypatch.setattr(crew_engine.CrewEngine, "pop_stage_seconds", pop_slowed)
    crew.gather("ada")
    crew.until(lambda: read_label(crew.lead) > 0)
    before = read_blocks(crew)
    crew.until(lambda: read_blocks(crew) != before)
    assert sum(read_blocks(crew)) == sum(before) and "a block moves from" in caplog.text
    # From now on speeds are measured, which may move the block back.
    monkeypatch.setattr(crew_engine.CrewEngine, "pop_stage_seconds", pop_stage_seconds)
    crew.until_saved(2)
    assert not crew.failures, crew.failures
    assert "without Adam's moments" not in caplog.text


def test_member_that_sends_what_is_not_finite_is_left_out(drill, swarm, caplog, monkeypatch):
    """Over real sockets; it may not come back with the same code, either."""
    caplog.set_level("INFO")
    run = swarm(MODEL, token_budget=1 << 40, evaluate_every=1 << 39)
    run.network = SocketNetwork(run.folder)
    crew = drill(run, members=2)
    code = crew.gather("ada", "ben")
    crew.until(lambda: read_label(crew.lead) > 0)
    encode = step_protocol.encode_weights

    def spoil(values, bits):
        is_ada = threading.current_thread().name == "ada"
        return encode(torch.full_like(values, torch.nan) if is_ada else values, bits)

    with monkeypatch.context() as patch:
        patch.setattr(step_protocol, "encode_weights", spoil)
        crew.until(lambda: "ada" in crew.failures)
    crew.until(lambda: read_members(crew) == {"ben"})
    assert sum(read_blocks(crew)) == MODEL.layers
    crew.until_saved(2)
    first = str(crew.failures.pop("ada"))
    crew.start_member("ada", code)
    crew.until(lambda: "ada" in crew.failures)
    refusals = [first, str(crew.failures.pop("ada"))]
    assert all("is left out: 3 times it sent what is not finite" in each for each in refusals)
    assert "ada is left out of the crew: 3 times" in caplog.text
    assert not crew.failures, crew.failures


def test_holder_killed_in_a_step_costs_no_round(drill, swarm, caplog, monkeypatch):
    """Over real sockets: the other holder of its span has its micro-batches in the next attempt."""
    caplog.set_level("INFO")
    run = swarm(replace(MODEL, layers=2), token_budget=1 << 40, evaluate_every=10_000)
    run.network = SocketNetwork(run.folder)
    quick_lead = cpu_machine(cores=1, disk=8 << 30, matmul=((768, 8e6),), attention=8e6)
    crew = drill(run, quick_lead, members=2)
    code = parse_code(crew.start_lead())
    for name in ("ada", "ben"):
        crew.start_member(name, code, SLOW_MACHINE)
    crew.until(lambda: read_label(crew.lead) > 0)
    assert read_blocks(crew) == [1, 1, 1], "ada and ben hold the same block"
    holders = crew.lead.engine.holders
    encode, killed_at = step_protocol.encode_weights, list[float]()

    def die(values, bits):
        if threading.current_thread().name == "ada" and not killed_at:
            killed_at.append(time.monotonic())
            raise Killed
        return encode(values, bits)

    monkeypatch.setattr(step_protocol, "encode_weights", die)
    crew.until(lambda: killed_at)
    step, label = crew.lead.metrics.step, read_label(crew.lead)
    crew.until(lambda: crew.lead.metrics.step > step)
    assert time.monotonic() - killed_at[0] < 5, "the step was attempted again at once"
    crew.until(lambda: read_label(crew.lead) > label)
    assert time.monotonic() - killed_at[0] < 20 and crew.lead.engine.holders is holders
    assert "ada of this crew is gone" in caplog.text and "the crew begins again" not in caplog.text
    reopen(crew, monkeypatch)  # it does not wait for ada
    monkeypatch.setattr(crew_joining, "REDIAL_SECONDS", 1.0)  # else too often for the lead's door
    crew.start_member("ada", code, SLOW_MACHINE)
    crew.until(lambda: "dealing the blocks again, with 1 more machine" in caplog.text)
    crew.until_saved(2)
    assert read_members(crew) == {"ada", "ben"} and not crew.failures, crew.failures
    assert "without Adam's moments" not in caplog.text and "begins again" not in caplog.text


def test_crew_whose_machines_meet_over_the_internet_trains(drill, swarm, monkeypatch):
    """Over QUIC alone, as through routers: the lead listens again where it formed the crew."""
    run = swarm(MODEL, token_budget=1 << 40, evaluate_every=10_000)
    connect_by_quic_alone(run, monkeypatch)
    crew = drill(run, members=1)
    crew.gather("ada")
    crew.until(lambda: crew.lead is not None and crew.lead.metrics.step > 0)
    assert not crew.failures, crew.failures


def test_code_has_the_addresses_at_which_others_reach_the_lead(drill, swarm, monkeypatch):
    """That which its owner announces; and in a second code the one that its router forwards."""
    router = Router(PcpMappings(ip="5.9.1.1").answer)
    times = PortMappingTimes(iroh_seconds=0.0, site_seconds=0.0)
    monkeypatch.setattr(port_mapping, "TIMES", times)
    monkeypatch.setattr(port_mapping, "read_default_sources", lambda: {4: "192.168.1.50"})
    monkeypatch.setattr(port_mapping, "_read_default_gateway", lambda: router.ip)
    monkeypatch.setattr(port_mapping, "remove_iroh_mapping", lambda port: None)
    run = swarm(MODEL)
    run.network = SocketNetwork(run.folder, ANY_HOST)
    crew = drill(run, members=1)
    crew.limits = Limits(announce=("203.0.113.7:45555",))
    first = parse_code(crew.start_lead(trains=False))
    crew.until(lambda: len(crew.codes) == 2)
    second = parse_code(crew.codes[1])
    assert first.addresses[0] == "203.0.113.7:45555"
    assert second.addresses[:2] == (first.addresses[0], "5.9.1.1:50000")
    assert second.secret == first.secret and first.addresses[1] in second.addresses
    crew.end()
    assert not crew.failures and len(router.requests) == 2, "the lead has released the port"


def test_crew_that_cannot_hold_the_model_any_longer_says_so(drill, swarm, monkeypatch):
    be_impatient(monkeypatch)
    monkeypatch.setattr(crew_worker, "RETURN_SECONDS", 2.0)  # for which it deals the blocks again
    crew = drill(swarm(MODEL, token_budget=150_000, evaluate_every=50_000), members=1)
    crew.gather("ada")
    crew.until(lambda: read_label(crew.lead) > 0)
    crew.stop_member("ada")
    crew.threads["lead"].join(60)
    assert "only the lead has room for blocks" in str(crew.failures.pop("lead"))


def test_member_that_its_owner_pauses_counts_as_gone(drill, swarm, caplog, monkeypatch):
    caplog.set_level("INFO")
    be_impatient(monkeypatch)
    crew = drill(swarm(MODEL, token_budget=150_000, evaluate_every=50_000), members=2)
    crew.gather("ada", "ben")
    crew.until(lambda: read_label(crew.lead) > 0)
    crew.members_pausing["ada"].set()
    crew.until(lambda: read_members(crew) == {"ben"})
    assert "a member paused by its owner" in caplog.text
    crew.members_pausing["ada"].clear()
    crew.until(lambda: read_members(crew) == {"ada", "ben"})
    crew.until_saved(1)
    assert not crew.failures, crew.failures


def test_member_paused_while_it_waits_for_a_seat_gets_none(drill, swarm, caplog):
    caplog.set_level("INFO")
    crew = drill(swarm(MODEL, token_budget=150_000, evaluate_every=50_000), members=2)
    code = crew.gather("ada")
    crew.until(lambda: "ada joined the crew" in caplog.text)
    crew.members_pausing["ada"].set()
    crew.until(lambda: "no longer asks for a seat" in caplog.text)
    for name in ("ben", "cleo"):
        crew.start_member(name, code)
    crew.until(lambda: crew.crews)
    assert {seat.name for seat in crew.crews[0].seating.seats} == {"the lead", "ben", "cleo"}
    crew.until_saved(1)
    assert not crew.failures, crew.failures


def test_paused_lead_pauses_its_crew(drill, swarm):
    crew = drill(swarm(MODEL, token_budget=150_000, evaluate_every=50_000), members=1)
    code = parse_code(crew.start_lead())
    folder = crew.start_member("ada", code)
    crew.until(lambda: read_label(crew.lead) > 0)
    control = LocalControl(crew.lead.joined.folder.path)
    control.pause()
    crew.until(lambda: crew.lead_status["activity"] == "paused")
    step = crew.lead.metrics.step
    time.sleep(2)
    assert crew.lead.metrics.step == step
    assert all(seat.connected for seat in read_crew_status(folder).seats)
    control.resume()
    crew.until(lambda: crew.lead.metrics.step > step)
    assert not crew.failures, crew.failures


def test_machine_that_can_hold_the_ends_leads_in_a_lost_leads_place(drill, monkeypatch):
    """It listens as the lead where it has listened as a member."""
    monkeypatch.setattr(crew_member, "CONNECT_SECONDS", 1.0)
    crew = drill(members=2)
    connect_by_quic_alone(crew.run, monkeypatch)
    code = parse_code(crew.start_lead(trains=False))  # it forms a crew, and is never seen again
    for name in ("ada", "ben"):
        crew.start_member(name, code)
    crew.until(lambda: crew.heirs)
    heir = crew.heirs[0]
    (other,) = {"ada", "ben"} - {heir}
    assert heir == crew.crews[0].seating.seats[1].name
    crew.threads[heir].join(30)
    crew.options = CrewOptions()
    crew.start_lead(trains=False, name=heir)
    crew.until(lambda: len(crew.crews) == 2)
    later = crew.crews[1]
    assert later.code.secret == code.secret and later.code.lead != code.lead
    assert [seat.name for seat in later.seating.seats] == ["the lead", other]
    crew.until(lambda: crew.heirs == [heir, other])  # this lead is lost as well
    assert not crew.failures, crew.failures


def test_lead_that_takes_the_peers_anchor_goes_on_with_its_crew(drill, swarm, monkeypatch):
    crew = drill(swarm(MODEL, token_budget=150_000, evaluate_every=50_000), members=1)
    crew.gather("ada")
    crew.until(lambda: read_label(crew.lead) > 0)
    reopen(crew, monkeypatch)
    assert crew.threads["ada"].is_alive() and not crew.failures, crew.failures


def test_heir_trains_under_its_own_key_however_long_it_opens(drill, swarm, monkeypatch, caplog):
    caplog.set_level("INFO")
    be_impatient(monkeypatch)
    for module in (crew_member, step_protocol):
        monkeypatch.setattr(module, "LEAD_SECONDS", 2.0)
    monkeypatch.setattr(snapshot_client, "REQUEST_TIMEOUT", 1.0)  # neither lead nor vera sends any
    run = swarm(MODEL, token_budget=1 << 40, evaluate_every=1 << 39)
    run.trust_peers()
    crew = drill(run, members=2)
    code = crew.gather("ada", "ben")
    crew.until_saved(1)
    vera = run.start("vera", knows=["lead"])  # from her the heir gets updates and text
    LocalControl(vera.worker.joined.folder.path).pause()
    crew.until(lambda: vera.status.get("activity") == "paused")
    crew.until(lambda: crew.lead_status["peers"])
    crew.kill_lead(monkeypatch)
    crew.until(lambda: crew.heirs)
    heir, fetch = crew.heirs[0], Prefetch.fetch_snapshot

    def fetch_slowly(prefetch, trust_one):
        time.sleep(2 * crew_member.CONNECT_SECONDS)
        return fetch(prefetch, trust_one)

    monkeypatch.setattr(crew_member, "CONNECT_SECONDS", 5.0)
    monkeypatch.setattr(Prefetch, "fetch_snapshot", fetch_slowly)
    crew.options = CrewOptions()
    crew.start_lead(name=heir, with_text=False, knows=["vera"])
    crew.until(lambda: crew.lead is not None)
    crew.until_saved(1)
    vector = crew.lead.ledger.vector()
    assert crew.lead.key != code.lead and vector[crew.lead.exchange.author.name] > 0
    assert len(vector) == 2, "it goes on with what the lost lead had published"
    assert not crew.failures, crew.failures


def connect_by_quic_alone(run: Any, monkeypatch) -> None:
    """Connect a run's machines over real sockets, as through routers that forward no TCP."""
    monkeypatch.setattr(TlsEndpoint, "listen", lambda endpoint, addresses: None)
    run.network = SocketNetwork(run.folder)


def reopen(crew: CrewDrill, monkeypatch) -> None:
    """Have the lead open its state again, as after taking its peers' anchor; wait for two saves."""
    resyncs: list[Exchange] = []
    monkeypatch.setattr(Exchange, "resync", lambda exchange: resyncs.append(exchange))
    monkeypatch.setattr(Exchange, "needs_resync", property(lambda exchange: not resyncs))
    crew.until(lambda: resyncs)
    crew.until_saved(2)


def be_impatient(monkeypatch) -> None:
    """Wait for a machine that is gone for a second or two."""
    for module in (crew_engine, crew_membership, crew_orders):
        monkeypatch.setattr(module, "RETURN_SECONDS", 2.0)


def read_blocks(crew: CrewDrill) -> list[int]:
    """Return how many blocks each machine of the crew holds."""
    return [seat.blocks for seat in crew.lead.crew.seating.seats]


def read_members(crew: CrewDrill) -> set[str]:
    """Return the names of the members with a seat."""
    return {seat.name for seat in crew.lead.crew.seating.seats[1:]}


def read_label(worker: CrewWorker) -> int:
    """Return when a crew has saved its state; 0 while its lead has no engine."""
    engine = getattr(worker, "engine", None)
    return engine.progress.label if engine is not None else 0


def test_machine_that_would_slow_the_crew_down_is_told_so(drill):
    crew = drill(hardware=FAST_MACHINE, members=2)
    code = parse_code(crew.start_lead(trains=False))
    crew.start_member("ada", code)
    crew.start_member("ben", code, SLOW_MACHINE)
    crew.until(lambda: crew.crews and crew.failures)
    assert len(crew.crews[0].seating.seats) == 2
    assert "the crew is faster without this machine" in str(*crew.failures.values())


def test_machine_with_another_code_is_refused(drill):
    crew = drill(members=1)
    code = parse_code(crew.start_lead(trains=False))
    crew.start_member("eve", replace(code, secret=bytes(16)))
    crew.until(lambda: "eve" in crew.failures)
    assert "the code is not that of this crew" in str(crew.failures["eve"])
    assert isinstance(crew.failures["eve"], CrewError)
    crew.start_member("ada", code)
    crew.until(lambda: crew.crews)
    assert [seat.name for seat in crew.crews[0].seating.seats] == ["the lead", "ada"]


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
    crew.until(lambda: crew.crews)
    assert crew.crews == [None]


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
