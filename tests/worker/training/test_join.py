"""Join a run with a coordinator that is slow, lying or absent."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from helpers.worker.fake_coordinator import MACHINE, RUN, FakeCoordinator, enrol

from barnraise.errors import (
    BarnraiseError,
    CoordinatorError,
    CoordinatorUnreachableError,
    MessageError,
    StateError,
    TicketError,
)
from barnraise.protocol.coordinator_messages import (
    Directive,
    JoinReply,
    Problem,
    RunView,
    Shard,
    TextManifest,
)
from barnraise.protocol.enums import Role, RunStatus, SigningRight
from barnraise.protocol.messages import Peer, Ticket
from barnraise.protocol.signing import Identity, digest
from barnraise.spec import ModelSpec, Recipe, RunSpec, Start, TextSpec
from barnraise.state_dir import StateDir
from barnraise.training import join

OWNER, STRANGER = Identity(b"o" * 32), Identity(b"x" * 32)
MODEL = ModelSpec(2, 32, 2, 32, 256)


class FakeSite(FakeCoordinator):
    """A coordinator of one run, whose answers tests change through its attributes."""

    def __init__(self, machine: str):
        super().__init__()
        shard = [Shard(digest="1" * 64, tokens=1000)]
        self.manifest = OWNER.sign(
            "manifest",
            TextManifest(run=RUN, vocabulary=256, tokenizer=None, train=shard, held_out=shard),
        )
        self.spec = dict(
            owner=OWNER.key, roots=(self.identity.key,), manifest=digest(self.manifest.body)
        )
        self.ticket = dict(
            run=RUN,
            peer=machine,
            machine=MACHINE,
            volunteer="0" * 64,
            roles=[Role.WORKER],
            max_tokens_per_second=1000,
            issued=0,
            expires=9e9,
            mirror=self.identity.key,
        )
        self.launched = True
        self.status = RunStatus.TRAINING
        self.routes["GET /runs/a-run"] = lambda body: self.view()
        self.routes[f"POST /runs/{RUN}/join"] = lambda body: self.reply()

    def view(self) -> RunView:
        spec = RunSpec(MODEL, TextSpec(tokenizer="bytes"), **self.spec).to_json()
        return RunView(
            id=RUN,
            slug="a-run",
            name="A run",
            status=self.status,
            spec=spec,
            manifest=self.manifest,
        )

    def reply(self) -> JoinReply:
        ticket = self.identity.sign("ticket", Ticket(**self.ticket)) if self.launched else None
        return JoinReply(
            run=self.view(),
            ticket=ticket,
            directive=self.signed_directive(),
            acknowledged=7,
            peers=[],
        )


@pytest.fixture
def home(tmp_path) -> StateDir:
    return StateDir(tmp_path / "home")


@pytest.fixture
def fake_site(home):
    fake = FakeSite(home.identity.key)
    enrol(home, fake.url, fake.identity.key)
    yield fake
    fake.close()


def join_without_waiting(home: StateDir, name: str = "a-run") -> join.JoinedRun:
    """Join a run, and unlock its folder."""
    joined = join.join_run(home, name, threading.Event())
    joined.folder.close()
    return joined


def test_joined_run_states_what_the_machines_gain_by_their_number(home, fake_site):
    fake_site.spec["recipe"] = Recipe(token_budget=10**9, codec="auto")
    alone = join_without_waiting(home)
    assert alone.describe_gain(1000.0) == "", "one machine gains nothing"
    others = tuple(
        Peer(key=key, addresses=[]) for key in (OWNER.key, STRANGER.key, home.identity.key)
    )
    among_others = replace(alone, peers=others)
    assert among_others.describe_gain(0.0) == "", "its speed is not known yet"
    gain = among_others.describe_gain(1000.0)
    assert re.fullmatch(
        r"With 4 machines on home lines this run ends \d\.\d × sooner than with one, at the same "
        r"loss\.",
        gain,
    )


def test_launched_run_is_joined_by_its_slug(home, fake_site):
    joined = join_without_waiting(home)
    assert (joined.run, joined.acknowledged, joined.spec.model) == (RUN, 7, MODEL)
    assert joined.folder.label.spec == joined.spec_digest


def test_machine_without_a_ticket_waits_while_its_site_restarts(home, fake_site, monkeypatch):
    monkeypatch.setattr(join, "SITE_POLL_SECONDS", 0.1)
    fake_site.close()
    leaving = threading.Event()
    with ThreadPoolExecutor(1) as other:
        joining = other.submit(join.join_run, home, "a-run", leaving)
        time.sleep(0.5)
        assert not joining.done()
        fake_site.open()
        joined = joining.result(20)
        assert joined and joined.run == RUN
        joined.folder.close()
        fake_site.close()
        waiting = other.submit(join.join_run, home, "another-run", leaving)
        time.sleep(0.3)
        leaving.set()
        assert waiting.result(20) is None


def test_join_without_a_coordinator_uses_the_stored_answer(home, fake_site, monkeypatch):
    monkeypatch.setattr(join, "SITE_WAIT_SECONDS", 0.0)
    with_site = join_without_waiting(home)
    fake_site.close()
    for name in ("a-run", RUN):
        without_site = join_without_waiting(home, name)
        assert without_site.spec == with_site.spec
        assert without_site.manifest == with_site.manifest
        assert without_site.ticket == with_site.ticket
    with pytest.raises(CoordinatorUnreachableError, match="does not answer"):
        join_without_waiting(home, "another-run")
    revoking = Directive(
        run=RUN,
        machine=MACHINE,
        status=RunStatus.TRAINING,
        revoked=[STRANGER.key],
        issued=time.time(),
    )
    (home.path / "runs" / RUN / join.DIRECTIVE_FILE).write_text(
        fake_site.identity.sign("directive", revoking).model_dump_json()
    )
    assert join_without_waiting(home).directive.revoked == [STRANGER.key]
    (home.path / "runs" / RUN / join.JOIN_REPLY_FILE).write_text('{"run":')
    with pytest.raises(StateError, match=r"join\.json is damaged"):
        join_without_waiting(home)


def test_waiting_for_a_launch_survives_an_absent_coordinator(home, fake_site, monkeypatch):
    monkeypatch.setattr("barnraise.training.join.NETWORK_POLL_SECONDS", 0.1)
    fake_site.launched = False
    results: list[join.JoinedRun] = []
    waiting = threading.Thread(target=lambda: results.append(join_without_waiting(home)))
    waiting.start()
    time.sleep(0.5)
    fake_site.close()
    time.sleep(0.7)
    assert waiting.is_alive(), "it gave up"
    fake_site.launched = True
    fake_site.open()
    waiting.join(10)
    assert results and results[0].run == RUN


def test_ctrl_c_interrupts_waiting_for_a_launch_and_frees_the_folder(home, fake_site):
    fake_site.launched = False
    leaving = threading.Event()
    results: list[join.JoinedRun | None] = []
    waiting = threading.Thread(target=lambda: results.append(join.join_run(home, "a-run", leaving)))
    waiting.start()
    time.sleep(0.3)
    leaving.set()
    waiting.join(5)
    assert results == [None]
    fake_site.launched = True
    join_without_waiting(home)


def replace_spec(fake_site: FakeSite, **fields) -> None:
    fake_site.spec |= fields


def sign_directive_as_a_stranger(fake_site: FakeSite) -> None:
    directive = Directive(run=RUN, machine=MACHINE, status=RunStatus.TRAINING, issued=0)
    fake_site.signed_directive = lambda: STRANGER.sign("directive", directive)


@pytest.mark.parametrize(
    ("spoil", "error", "reason"),
    [
        (
            lambda fake_site: replace_spec(fake_site, manifest="2" * 64),
            MessageError,
            "is not the one its spec names",
        ),
        (
            lambda fake_site: replace_spec(fake_site, owner=STRANGER.key),
            MessageError,
            "is signed by",
        ),
        (
            lambda fake_site: replace_spec(fake_site, roots=(STRANGER.key,)),
            StateError,
            "does not list",
        ),
        (lambda fake_site: fake_site.ticket.update(run=MACHINE), TicketError, "is for run"),
        (lambda fake_site: fake_site.ticket.update(peer=STRANGER.key), TicketError, "is for peer"),
        (
            lambda fake_site: fake_site.ticket.update(mirror=STRANGER.key),
            TicketError,
            "not a mirror",
        ),
        (
            lambda fake_site: fake_site.directive.update(machine=RUN),
            MessageError,
            "is for another machine or run",
        ),
        (sign_directive_as_a_stranger, MessageError, "is signed by"),
    ],
)
def test_inconsistent_answer_is_refused_and_nothing_is_pinned(
    home, fake_site, spoil, error, reason
):
    spoil(fake_site)
    with pytest.raises(error, match=reason):
        join_without_waiting(home)
    folder = home.open_run(RUN)  # the refusal has unlocked it
    assert folder.label.spec == ""
    folder.close()


def test_ended_run_and_refused_run_give_a_sentence(home, fake_site):
    fake_site.launched = False
    fake_site.status = RunStatus.CANCELLED
    with pytest.raises(CoordinatorError, match="is cancelled: there is nothing to train"):
        join_without_waiting(home)
    fake_site.routes[f"POST /runs/{RUN}/join"] = lambda body: (
        403,
        Problem(error="only the owner's machines may join"),
    )
    with pytest.raises(BarnraiseError, match="only the owner's machines may join"):
        join_without_waiting(home)


def test_another_spec_under_the_same_id_is_refused(home, fake_site):
    join_without_waiting(home)
    replace_spec(fake_site, seed=5)
    with pytest.raises(StateError, match="was trained under spec"):
        join_without_waiting(home)


def test_draft_is_looked_at_often_at_first_and_then_as_often_as_reported():
    pauses = [join.draft_pause(attempt, 10.0) for attempt in range(200)]
    assert pauses == sorted(pauses) and pauses[0] == 1.0 and pauses[-1] == 10.0
    assert sum(pauses[:5]) < 10.0, "several looks before the first report would be due"
    assert join.draft_pause(0, 0.2) == join.draft_pause(9, 0.2) == 1.0


@pytest.mark.parametrize(
    ("source", "launching", "signing", "words"),
    [
        ("stdlib", True, SigningRight.UNCONFIRMED, "once you confirm at PAGE"),
        ("files", True, SigningRight.UNCONFIRMED, "`barnraise prepare a-run TEXT`"),
        ("model", True, SigningRight.UNCONFIRMED, "`barnraise prepare a-run --model FOLDER`"),
        ("stdlib", True, SigningRight.REFUSED, "is launched: waiting for a machine of its owner"),
        ("stdlib", True, SigningRight.ALLOWED, "one of your machines prepares its text"),
        ("stdlib", False, SigningRight.ALLOWED, "is not launched yet"),
    ],
)
def test_wait_for_a_draft_is_told_by_what_it_lacks(source, launching, signing, words):
    start = Start(model="folder") if source == "model" else Start()
    text = TextSpec(source="stdlib" if source == "model" else source, tokenizer="bytes")
    spec = RunSpec(MODEL, text, start=start).to_json()
    run = RunView(
        id=RUN, slug="a-run", name="A", status=RunStatus.DRAFT, launching=launching, spec=spec
    )
    directive = OWNER.sign("directive", Shard(digest="1" * 64, tokens=1))
    reply = JoinReply(run=run, ticket=None, directive=directive, peers=[], signing=signing)
    sentence = join.describe_wait(reply, "PAGE")
    assert words in sentence and ("not launched" in sentence) is not launching
