"""Test `barnraise verdict` on a ledger that a worker uses at the same time."""

from dataclasses import replace

import pytest
from helpers.updates.headers import sign_chain
from helpers.worker.command_line import RUN, assert_fails, call_barnraise, run_barnraise

from barnraise.exchange.verdicts.verdict_handler import VERDICT_FOLDER
from barnraise.ledger.ledger import Ledger
from barnraise.ledger.validation import UpdateRules
from barnraise.ledger.verdict_set import verify_proof
from barnraise.protocol.coordinator_messages import JoinReply, Problem, RunView
from barnraise.protocol.verdicts import SignedVerdict, Verdict
from barnraise.spec import ModelSpec, RunSpec, TextSpec
from barnraise.state_dir import StateDir
from barnraise.training.join import JOIN_REPLY_FILE

PEER = "b" * 64
AUTHOR = f"{PEER}.{'c' * 16}"


class OwnersMachine:
    """A machine whose folder of a run is open and holds three updates of a peer."""

    def __init__(self, home):
        self.home = home
        self.state_dir = StateDir(home)
        self.folder = self.state_dir.open_run(RUN)
        self.ledger = Ledger(self.folder.path)
        author = {"run": RUN, "peer": PEER, "incarnation": "c" * 16}
        for header in sign_chain(self.state_dir.identity, 3, **author):
            self.ledger.append(*header)
        self.spec = RunSpec(
            ModelSpec(1, 16, 1, 8, 256),
            TextSpec(tokenizer="bytes"),
            owner=self.state_dir.identity.key,
            roots=("a" * 64,),
        )
        self.save_spec(self.spec)

    def save_spec(self, spec: RunSpec) -> None:
        """Store the run's rules, as joining does."""
        directive = self.state_dir.identity.sign("directive", Problem(error="not read"))
        view = RunView(id=RUN, slug="a-run", name="A", status="training", spec=spec.to_json())
        reply = JoinReply(run=view, ticket=None, directive=directive, peers=[])
        self.folder.save_message(JOIN_REPLY_FILE, reply)

    def run_verdict(self, *options: str):
        """Run `barnraise verdict` for the run."""
        return call_barnraise(self.home, "verdict", "a-run", *options)

    def close(self) -> None:
        """Close the ledger and unlock the folder."""
        self.ledger.close()
        self.folder.close()


@pytest.fixture
def machine(tmp_path):
    """Yield the machine that owns the run."""
    machine = OwnersMachine(tmp_path)
    yield machine
    machine.close()


def test_verdict_without_options_lists_the_authors(machine):
    result = machine.run_verdict()
    assert result.returncode == 0 and AUTHOR in result.stdout, result


def test_verdict_of_the_owner_is_signed_and_stored(machine):
    options = ("--peer", "b" * 12, "--after", "1", "--reason", "noise")
    result = run_barnraise(machine.home, "verdict", "a-run", *options)
    assert result.returncode == 0 and "Signed." in result.stdout, result
    (path,) = (machine.folder.path / VERDICT_FOLDER).glob("*.json")
    rules = UpdateRules.from_spec(machine.spec, RUN, frozenset(machine.spec.roots))
    signed_verdict = SignedVerdict.model_validate_json(path.read_bytes())
    assert verify_proof(signed_verdict, rules).limits == {AUTHOR: 1}


@pytest.mark.slow  # the next test excludes a machine
def test_verdict_excludes_a_volunteer_and_what_it_published(machine):
    result = machine.run_verdict("--peer", PEER, "--exclude", "volunteer")
    assert result.returncode == 0 and "Signed." in result.stdout, result
    (path,) = (machine.folder.path / VERDICT_FOLDER).glob("*.json")
    verdict = Verdict.model_validate_json(SignedVerdict.model_validate_json(path.read_bytes()).body)
    assert verdict.keys == {PEER: {}} and verdict.volunteers == {"0" * 64: {}}


def test_verdict_excludes_a_machine_and_keeps_its_updates(machine):
    machine.run_verdict("--peer", PEER, "--exclude", "machine", "--keep")
    (path,) = (machine.folder.path / VERDICT_FOLDER).glob("*.json")
    verdict = Verdict.model_validate_json(SignedVerdict.model_validate_json(path.read_bytes()).body)
    assert list(verdict.keys) == [PEER] and list(verdict.keys[PEER]) == [AUTHOR]
    assert not verdict.volunteers
    assert_fails(machine.run_verdict("--peer", "e" * 8, "--exclude", "machine"), "give the key")


def test_verdict_clears_a_suspended_volunteer(machine):
    result = machine.run_verdict("--peer", PEER, "--clear")
    assert result.returncode == 0 and "Signed." in result.stdout, result
    (path,) = (machine.folder.path / VERDICT_FOLDER).glob("*.json")
    verdict = Verdict.model_validate_json(SignedVerdict.model_validate_json(path.read_bytes()).body)
    assert verdict.cleared == ["0" * 64] and not verdict.volunteers


def test_verdict_on_unknown_updates_is_refused(machine):
    assert_fails(machine.run_verdict("--peer", "e" * 64), "is in this machine's ledger")
    assert_fails(machine.run_verdict("--update", "x:1"), "is not KEY.INCARNATION:NUMBER")


def test_verdict_is_signed_only_by_the_owners_machine(machine):
    machine.save_spec(replace(machine.spec, owner="d" * 64))
    assert_fails(machine.run_verdict("--peer", PEER), "are signed by the machine dddddddd")
