"""Tests of this machine as an author: what it states under its ticket, by which clock."""

import secrets
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from helpers.updates import tickets
from hypothesis import given, settings

from barnraise.ledger.ledger import Ledger
from barnraise.ledger.local_author import AuthorConfig, LocalAuthor
from barnraise.ledger.validation import UpdateRules, validate_claim, validate_header
from barnraise.protocol import messages
from barnraise.protocol.signing import Identity
from barnraise.spec import ModelSpec, RunSpec

RUN = tickets.RUN
SELF, MIRROR = Identity(b"\x01" * 32), Identity(b"\x02" * 32)
SPEC = RunSpec(ModelSpec(1, 16, 1, 8, 256), roots=(MIRROR.key,))
RULES = UpdateRules.from_spec(SPEC, RUN, frozenset([MIRROR.key]))
PART = messages.FragmentUpdate(digest="a" * 64, size=20, sketch="0" * 16)
NOW = 1_000_000.0


def sign_ticket(rate: int, issued: float = NOW) -> messages.Signed:
    return tickets.sign_ticket(MIRROR, SELF.key, max_tokens_per_second=rate, issued=issued)


class TrainingMachine:
    """A machine with a ledger, whose clock the test moves."""

    def __init__(self, folder: Path, rate: int = 100):
        self.now = NOW
        self.ledger = Ledger(folder)
        self.ledger.blobs.has = lambda digest: True  # the test has no payloads
        self.ticket = sign_ticket(rate)
        self.incarnation = "0" * 16
        self.published: list[messages.Update] = []
        self.restart()

    def restart(self) -> None:
        """Start a new process, with the same state directory and ticket."""
        config = AuthorConfig(
            identity=SELF,
            run=RUN,
            incarnation=self.incarnation,
            ticket=self.ticket,
            spec=SPEC,
            clock=lambda: self.now,
            reincarnate=self.reincarnate,
        )
        self.author = LocalAuthor(config, self.ledger)

    def reincarnate(self) -> str:
        self.incarnation = secrets.token_hex(8)
        return self.incarnation

    def publish(self, tokens: int, seconds: float = 1.0) -> messages.Update:
        """Train for some seconds, then publish."""
        self.now += seconds
        self.published.append(self.author.append_update([PART] * len(RULES.sizes), tokens))
        self.validate_last()
        return self.published[-1]

    def validate_last(self) -> None:
        """Check the last update as every peer does."""
        update = self.published[-1]
        signed = self.ledger.header(update.author, update.seq)
        ticket = self.ledger.tickets.get(update.ticket)
        assert signed is not None and ticket is not None
        assert validate_header(signed, ticket, RULES) == update
        earlier = [u.time_ms for u in self.published[:-1] if u.author == update.author]
        previous_ms = max([update.started_ms, *earlier])
        validate_claim(update, messages.Ticket.model_validate_json(ticket.body), previous_ms)


@pytest.fixture
def machine(tmp_path):
    machine = TrainingMachine(tmp_path)
    yield machine
    machine.ledger.close()


def test_honest_machine_within_its_ticket_states_all_its_tokens(machine):
    assert [machine.publish(50).tokens for _ in range(5)] == [50] * 5
    assert machine.ledger.tokens == 250 and machine.author.unstated_tokens == 0


def test_machine_faster_than_its_ticket_states_the_rest_later(machine, caplog):
    assert [machine.publish(300).tokens for _ in range(5)] == [100] * 5
    assert machine.author.unstated_tokens == 1000
    assert caplog.text.count("trains faster than the 100 tokens per second") == 1
    machine.author.set_ticket(sign_ticket(rate=1000, issued=machine.now))
    assert machine.publish(300).tokens == 1000 and machine.publish(300).tokens == 600
    assert machine.ledger.tokens == 7 * 300 and machine.author.unstated_tokens == 0


def test_clock_that_goes_back_still_gives_ascending_times(machine):
    first = machine.publish(50)
    second = machine.publish(50, seconds=-30.0)
    assert second.author == first.author and second.time_ms == first.time_ms + 1
    assert second.tokens == 0, "no time has passed in which they could have been trained"
    third = machine.publish(50, seconds=32.0)
    assert third.tokens == 100, "the ones before are stated now"


def test_clock_that_was_a_day_ahead_ends_the_incarnation(machine, caplog):
    machine.publish(50, seconds=86_000.0)
    first = machine.publish(50)
    machine.now -= 86_000.0
    second = machine.publish(50)
    assert second.author != first.author and second.time_ms == round(1000 * machine.now)
    assert "clock was 85999 seconds ahead" in caplog.text


def test_restart_and_new_incarnation_state_every_token_once(machine):
    for _ in range(3):
        machine.publish(80)
    machine.restart()
    machine.publish(80)
    machine.author.on_verdicts(machine.ledger.verdicts)  # which end nothing
    lost = machine.published[-1].model_copy(update={"seq": 9})
    machine.author.on_own_update(lost)
    machine.publish(80)
    starts = {update.author: update.started_ms for update in machine.published}
    assert len(starts) == 2 and machine.ledger.tokens == 5 * 80
    assert max(starts.values()) == machine.published[3].time_ms


events = st.lists(
    st.one_of(
        st.tuples(st.just("train"), st.integers(0, 400), st.integers(-100, 300)),
        st.tuples(st.just("restart")),
        st.tuples(st.just("lose")),
        st.tuples(st.just("renew"), st.integers(1, 400)),
    ),
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(events)
def test_machine_never_exceeds_its_own_limit(history):
    """Whatever its clock does, and however often it restarts, every update of it counts."""
    with tempfile.TemporaryDirectory() as folder:
        machine = TrainingMachine(Path(folder))
        highest = 100
        for kind, *values in history:
            if kind == "train":
                machine.publish(values[0], values[1])
            elif kind == "restart":
                machine.restart()
            elif kind == "lose" and machine.published:
                last = machine.published[-1]
                machine.author.on_own_update(last.model_copy(update={"seq": last.seq + 1}))
            elif kind == "lose":
                continue
            else:
                highest = max(highest, values[0])
                machine.ticket = sign_ticket(values[0], max(NOW, machine.now))
                machine.author.set_ticket(machine.ticket)
        last_ms = max((update.time_ms for update in machine.published), default=0)
        assert machine.ledger.tokens <= max(0, highest * (last_ms - 1000 * NOW) / 1000)
        machine.ledger.close()


def test_ticket_of_the_future_waits_while_the_present_one_is_valid(tmp_path):
    """A mirror whose clock is an hour ahead issued it: peers would hold back what names it."""
    machine = TrainingMachine(tmp_path)
    machine.publish(10)
    ahead = sign_ticket(100, issued=machine.now + 3600)
    assert machine.author.should_keep_ticket(ahead)
    assert not machine.author.should_keep_ticket(sign_ticket(100, issued=machine.now + 1))
    machine.now = messages.Ticket.model_validate_json(machine.ticket.body).expires + 1
    assert not machine.author.should_keep_ticket(sign_ticket(100, issued=machine.now + 3600))


CREW = [Identity(bytes([number]) * 32).key for number in range(10, 30)]


def test_lead_states_members_tokens_by_their_flops_across_restarts(machine):
    machine.author.set_crew({SELF.key: 50, CREW[0]: 30, CREW[1]: 20})
    assert machine.publish(99).tokens_by_member == {CREW[0]: 29, CREW[1]: 19}
    machine.restart()
    assert machine.publish(90).tokens_by_member == {CREW[0]: 29, CREW[1]: 19}
    machine.author.set_crew({SELF.key: 1, CREW[1]: 1})
    assert machine.publish(90).tokens_by_member == {CREW[0]: 29, CREW[1]: 64}
    assert [share.key for share in machine.published[-1].crew] == sorted(CREW[:2])


def test_lead_has_the_part_for_which_the_header_has_no_room(machine):
    machine.author.set_crew(dict.fromkeys([SELF.key, *CREW[:3]], 1))
    assert machine.publish(80).tokens_by_member == dict.fromkeys(CREW[:2], 20)


@settings(max_examples=20, deadline=None)
@given(
    flops=st.lists(st.integers(1, 10**18), min_size=2, max_size=3),
    rounds=st.lists(st.integers(0, 100), min_size=1, max_size=5),
)
def test_lead_states_shares_that_every_peer_accepts(flops, rounds):
    with tempfile.TemporaryDirectory() as folder:
        machine = TrainingMachine(Path(folder))
        machine.author.set_crew(dict(zip([SELF.key, *CREW], flops, strict=False)))
        for tokens in rounds:
            machine.publish(tokens)
        shares = machine.published[-1].tokens_by_member
        for key, own in zip(CREW, flops[1:], strict=False):
            exact = sum(rounds) * own / sum(flops)
            assert exact - len(rounds) - 1 < shares[key] <= exact + 1
        machine.ledger.close()
