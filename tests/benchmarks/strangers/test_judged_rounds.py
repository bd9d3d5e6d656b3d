"""Tests of opinions on simulated rounds: harmful strangers are suspended, honest machines never."""

import pytest
from helpers.drill_modules import import_drill_module

from barnraise.exchange.weights import opinion_former
from barnraise.exchange.weights.opinion_former import OpinionFormer
from barnraise.ledger.suspension import Statement
from barnraise.ledger.verdict_set import VerdictSet
from barnraise.planning.round_limits import LATE_ROUNDS, OPINION_ROUNDS, WEAK_ROUNDS
from barnraise.protocol.enums import Standing
from barnraise.protocol.messages import Update
from barnraise.protocol.opinions import Doubt
from barnraise.protocol.verdicts import Verdict

judged_rounds = import_drill_module("judged_rounds")
QUIET_ROUNDS = 8  # before the strangers of a test come
ME, BEN, EVE = "a" * 64, "b" * 64, "e" * 64


@pytest.mark.parametrize(
    ("honest", "strangers"),
    [(2, [-3.0]), (2, [-1.0] * 3), (2, [-0.5]), (2, [0.0] * 8), (5, [-1.0] * 9)],
    ids=["one of three", "three of five", "weak", "idle", "nine of fourteen"],
)
@pytest.mark.parametrize("scheme", ["dense4", "top64x2"])
def test_harmful_strangers_are_suspended_within_two_rounds_of_detection(honest, strangers, scheme):
    run = judged_rounds.JudgedRounds(honest, [], scheme)
    for _ in range(QUIET_ROUNDS):
        assert not run.run_round()
    run.add_strangers(strangers)
    rounds, suspended = 0, set()
    while len(suspended) < len(strangers):
        suspended = run.run_round()
        rounds += 1
        assert rounds <= 5 and not suspended & {*range(honest)}


@pytest.mark.parametrize(
    ("scheme", "shared"),
    [("dense4", 0.7), ("top64x2", 0.9), ("top64x2", 0.7), ("top64x2", 0.55), ("top64x2", 0.2)],
)
def test_honest_machines_suspend_nobody_whatever_their_agreement(scheme, shared):
    assert judged_rounds.count_honest_suspended(60, scheme, shared) == 0


# ---- one machine's opinions


class Opinions:
    """One machine that receives updates of one other volunteer, and what it has stated."""

    def __init__(self) -> None:
        self.former = OpinionFormer()
        self.verdicts = VerdictSet(volunteers={f"{EVE}.{n:016x}": EVE for n in range(3)})
        self.seq = 0
        self.now_ms = 0

    def receive_round(self, agreement: float, rounds: int = 1, can_judge: bool = True) -> bool:
        """Receive an update of Eve and end a round; return whether something was stated."""
        has_stated = False
        for _ in range(rounds):
            self.seq += 1
            self.now_ms += 1000
            self.former.record_update(
                Update.model_construct(
                    peer=EVE, incarnation=f"{1:016x}", seq=self.seq, volunteer=EVE
                )
            )
            doubted = [] if agreement > 0.05 or not can_judge else [EVE]
            self.former.record_round({EVE: agreement}, doubted, can_judge)
            self.former.record_harm({EVE: agreement}, doubted)
            vector = {f"{EVE}.{0:016x}": 50, f"{EVE}.{1:016x}": self.seq}
            formed = self.former.form(ME, self.verdicts, vector, self.now_ms)
            if formed is not None:
                has_stated = True
                statement = Statement(
                    ME,
                    Standing.INVITED,
                    self.now_ms,
                    formed.doubted,
                    frozenset(formed.agreeing),
                    frozenset(formed.attested),
                )
                self.verdicts = VerdictSet(
                    statements={ME: statement},
                    parsed=self.verdicts.parsed,
                    volunteers=self.verdicts.volunteers,
                )
        return has_stated

    @property
    def doubt(self) -> Doubt | None:
        return self.verdicts.statements[ME].doubted.get(EVE)

    @property
    def attests(self) -> bool:
        return EVE in self.verdicts.statements[ME].attested

    @property
    def agrees(self) -> bool:
        return EVE in self.verdicts.statements[ME].agreeing


def test_doubt_needs_rounds_in_a_row_and_does_not_flip():
    machine = Opinions()
    assert machine.receive_round(0.4) and not machine.agrees and machine.doubt is None
    machine.receive_round(0.4, rounds=3)
    assert machine.agrees
    for _ in range(5):
        assert not machine.receive_round(0.0, rounds=OPINION_ROUNDS - 1), "it is not stated again"
        assert not machine.receive_round(0.1)
    assert machine.receive_round(-0.4) and machine.doubt and not machine.agrees, (
        "harm shows at once"
    )
    assert not machine.receive_round(0.1, rounds=20) and machine.doubt, (
        "a middling agreement ends no doubt"
    )
    machine.receive_round(0.4, rounds=3)
    assert machine.doubt is None and machine.agrees


def test_newcomer_that_agrees_little_is_attested_later_a_useless_one_never():
    """A machine that is much slower than the others agrees little, and so do all in the end."""
    for agreement, can_judge, rounds in (
        (0.4, True, OPINION_ROUNDS),
        (0.1, True, WEAK_ROUNDS),
        (0.02, False, WEAK_ROUNDS),
    ):
        machine = Opinions()
        machine.receive_round(agreement, rounds - 1, can_judge)
        assert not machine.attests
        machine.receive_round(agreement, 1, can_judge)
        assert machine.attests
        machine.receive_round(-0.4, 3)
        assert machine.attests, "what was attested stays so; a doubt says the rest"
    for agreement, can_judge in ((0.03, True), (-0.1, True), (-0.1, False)):
        machine = Opinions()
        machine.receive_round(agreement, 3 * WEAK_ROUNDS, can_judge)
        assert not machine.attests


def test_doubt_leaves_what_agreed_and_what_was_never_compared():
    machine = Opinions()
    machine.receive_round(0.4, rounds=10)
    machine.receive_round(0.0, rounds=OPINION_ROUNDS)
    assert machine.doubt is not None
    last_good = 10 - LATE_ROUNDS + 1
    assert machine.doubt.kept == {f"{EVE}.{0:016x}": 50, f"{EVE}.{1:016x}": last_good}
    newcomer = Opinions()
    newcomer.seq = 7  # known since its eighth update
    newcomer.receive_round(0.0, rounds=OPINION_ROUNDS)
    assert newcomer.doubt and newcomer.doubt.kept == {
        f"{EVE}.{0:016x}": 50,
        f"{EVE}.{1:016x}": 7,
    }


def test_cleared_volunteer_is_doubted_anew_only_by_new_rounds(monkeypatch):
    monkeypatch.setattr(opinion_former, "RENEWAL_MS", 10**9)
    machine = Opinions()
    machine.receive_round(0.0, rounds=OPINION_ROUNDS)
    before = machine.doubt
    assert before is not None
    cleared = Verdict.model_construct(
        cleared=[EVE], issued=machine.now_ms / 1000, volunteers={}, keys={}, after={}, updates={}
    )
    machine.verdicts = VerdictSet(
        statements=machine.verdicts.statements,
        parsed={"verdict": cleared},
        volunteers=machine.verdicts.volunteers,
    )
    machine.receive_round(0.1)
    assert machine.doubt is None
    machine.receive_round(0.0, rounds=OPINION_ROUNDS)
    assert machine.doubt and machine.doubt.since_ms > before.since_ms
