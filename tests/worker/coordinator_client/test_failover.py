"""A machine and all mirrors of its site: over real HTTP, with mirrors that die, lag behind, lie, or come back."""

import json
import threading
import time
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from helpers import wait_for
from helpers.fake_coordinator import MACHINE, RUN
from helpers.fake_coordinator import FakeCoordinator as Small
from helpers.mirror_lists import list_entry, signed_list

from barnraise.coordinator_client import failover as failover_module
from barnraise.coordinator_client.failover import MIRROR_LIST_FILE, FailoverClient, MirrorSelector
from barnraise.coordinator_client.reporter import Reporter, ReportSpool, WorkerFigures
from barnraise.errors import CoordinatorError, CoordinatorUnreachableError
from barnraise.protocol.coordinator_messages import (
    Directive,
    JoinReply,
    MirrorView,
    Problem,
    RunView,
)
from barnraise.protocol.enums import Activity, RunStatus
from barnraise.protocol.messages import Peer
from barnraise.protocol.mirror_list import Expulsion, MirrorLists, parse_list, rank_mirrors
from barnraise.protocol.signing import Identity, digest
from barnraise.spec import ModelSpec, RunSpec, TextSpec
from barnraise.state_dir import SiteMembership, StateDir

waits_for = partial(wait_for.wait_until, seconds=15.0)


class Mirror(Small):
    """One of several. `lists`: those it serves; `joined`: what machines said as they came."""

    def __init__(self, number: int):
        super().__init__(Identity(bytes([number]) * 32))
        self.lists, self.joined = [], []
        self.routes[f"POST /runs/{RUN}/join"] = self.take
        for after in range(4):
            self.routes[f"GET /mirrors/list?after={after}"] = lambda body, after=after: MirrorLists(
                lists=[each for each in self.lists if parse_list(each).version > after]
            )

    def take(self, body: bytes):
        if self.failing:
            return self.failing[0], Problem(error=self.failing[1])
        self.joined.append(json.loads(body))
        spec = RunSpec(ModelSpec(2, 32, 2, 32, 256), TextSpec(tokenizer="bytes")).to_json()
        run = RunView(id=RUN, slug="a-run", name="A run", status=RunStatus.TRAINING, spec=spec)
        peers = [Peer(key=self.identity.key, addresses=["127.0.0.1:1"])]
        return JoinReply(run=run, ticket=None, directive=self.signed_directive(), peers=peers)

    def names(self, signed) -> None:
        self.lists = [signed]
        self.directive |= {
            "mirror_list_version": parse_list(signed).version,
            "mirror_list_digest": digest(signed.body),
        }

    @property
    def listed(self):
        return list_entry(self.identity, self.url)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(failover_module, "FIRST_WAIT", 0.4)
    monkeypatch.setattr(failover_module, "LONGEST_WAIT", 0.8)


@pytest.fixture
def home(tmp_path) -> StateDir:
    return StateDir(tmp_path / "home")


@pytest.fixture
def mirrors(home):
    """Three of one list, in the order in which this machine prefers them; it is enrolled at the last."""
    made = [Mirror(n) for n in (1, 2, 3)]
    order = [each.key for each in rank_mirrors(home.identity.key, [m.listed for m in made])]
    made.sort(key=lambda mirror: order.index(mirror.identity.key))
    signed = signed_list(1, *(m.listed for m in made))
    for mirror in made:
        mirror.names(signed)
    view = MirrorView(key=made[2].identity.key, name="third", protocols=[1], time=0)
    home.save_membership(SiteMembership(url=made[2].url, mirror=view, machine=MACHINE))
    yield made
    for mirror in made:
        mirror.close()


@pytest.fixture
def client(home, mirrors):
    made = FailoverClient.from_state_dir(home)
    yield made
    made.close()


@pytest.fixture
def reporter(home, client, tmp_path):
    """Reports five times a second, to whichever of them."""
    first = Directive(
        run=RUN, machine=MACHINE, status=RunStatus.TRAINING, report_every=0.2, issued=0
    )
    client.join_run(RUN, [])
    made = Reporter(client, RUN, MACHINE, first, ReportSpool(tmp_path / "spool.sqlite"))
    made.update_figures(WorkerFigures(activity=Activity.TRAINING, addresses=("127.0.0.1:4000",)))
    made.start()
    yield made
    made.stop()


def test_client_learns_all_mirrors_and_reports_to_the_preferred_one(home, mirrors, reporter):
    waits_for(lambda: mirrors[0].reports)
    assert (
        parse_list(
            MirrorLists.model_validate_json((home.path / MIRROR_LIST_FILE).read_bytes()).lists[-1]
        ).version
        == 1
    )
    assert FailoverClient.from_state_dir(home).select_mirror() == mirrors[0].identity.key, (
        "after a restart, too"
    )


def test_client_announces_itself_to_every_mirror_and_collects_peers(mirrors, reporter):
    waits_for(
        lambda: all(any(said["addresses"] for said in mirror.joined) for mirror in mirrors[:2])
    )
    found: set[str] = set()
    waits_for(lambda: found.update(peer.key for peer in reporter.pop_peers()) or len(found) >= 2)


def test_unconfirmed_reports_go_to_the_next_mirror_and_back_later(mirrors, reporter):
    waits_for(lambda: mirrors[0].reports)
    mirrors[0].close()
    waits_for(lambda: mirrors[1].reports)
    before = len(mirrors[0].reports)
    assert min(mirrors[1].reports) == 1, "its mark was 0: all of it is told again"
    mirrors[0].open()
    waits_for(lambda: len(mirrors[0].reports) > before)
    assert sorted(mirrors[0].reports) == list(range(1, len(mirrors[0].reports) + 1)), (
        "nothing is missing"
    )


def test_while_no_mirror_answers_reports_wait_and_none_is_lost(mirrors, reporter):
    waits_for(lambda: mirrors[0].reports)
    for mirror in mirrors:
        mirror.close()
    time.sleep(1.0)
    mirrors[1].open()
    waits_for(lambda: len(mirrors[1].reports) > 4)
    assert sorted(mirrors[1].reports) == list(range(1, len(mirrors[1].reports) + 1))
    assert reporter.refused is None


@pytest.mark.parametrize("status", [401, 403, 404])
def test_one_mirror_alone_cannot_send_a_machine_away(mirrors, reporter, status):
    waits_for(lambda: mirrors[0].reports)
    mirrors[0].failing = (status, "this machine is not in the run")
    waits_for(lambda: mirrors[1].reports)
    assert reporter.refused is None


def test_most_of_the_mirrors_together_can_send_a_machine_away(mirrors, reporter):
    waits_for(lambda: mirrors[0].reports)
    for mirror in mirrors[:2]:
        mirror.failing = (403, "this machine was revoked")
    waits_for(lambda: reporter.refused)
    assert "this machine was revoked" in reporter.refused


def test_directive_of_the_next_mirror_counts_despite_a_fast_clock(mirrors, reporter):
    mirrors[0].issued = 9e9
    waits_for(lambda: reporter.directive.issued == 9e9)
    mirrors[0].close()
    mirrors[1].directive |= {"status": RunStatus.PAUSED}
    waits_for(lambda: reporter.directive.status is RunStatus.PAUSED)


def test_newer_list_from_any_mirror_is_adopted_and_expelled_one_left(mirrors, client, reporter):
    waits_for(lambda: mirrors[0].reports and client.newest_list)
    newer = signed_list(
        2,
        mirrors[0].listed.model_copy(update={"expelled": Expulsion(at=1.0)}),
        mirrors[1].listed,
        mirrors[2].listed,
    )
    mirrors[2].lists = [newer]
    client.visit_mirrors_now()
    waits_for(lambda: client.newest_list.version == 2)
    waits_for(lambda: mirrors[1].reports)
    assert mirrors[0].identity.key not in client.keys


@pytest.mark.parametrize("signers", [0, 1])
def test_first_list_with_too_few_signatures_is_refused(mirrors, client, signers, caplog):
    for mirror in mirrors:
        mirror.names(signed_list(1, *(m.listed for m in mirrors), signers=signers))
    client.join_run(RUN, [])
    client.receive_mirror_lists(mirrors[2].lists)
    assert client.newest_list is None and f"signed by {signers} of" in caplog.text
    assert client.select_mirror() == mirrors[2].identity.key


def test_first_list_not_named_by_the_own_mirror_is_refused(mirrors, client, caplog):
    client.join_run(RUN, [])
    client.receive_mirror_lists([signed_list(1, mirrors[0].listed)])
    assert client.newest_list is None and "which this machine's mirror names" in caplog.text


def test_older_expired_or_conflicting_list_is_refused(mirrors, client, caplog):
    client.join_run(RUN, [])
    client.receive_mirror_lists(mirrors[2].lists)
    client.receive_mirror_lists([signed_list(2, *(m.listed for m in mirrors))])
    held = client.mirror_lists
    for told, sentence in (
        (signed_list(1, mirrors[0].listed), "older than 2"),
        (signed_list(2, *(m.listed for m in mirrors[::-1])), "two different mirror lists 2"),
        (signed_list(3, *(m.listed for m in mirrors), expires=5.0), "expired"),
    ):
        client.receive_mirror_lists([told])
        assert client.mirror_lists == held and sentence in caplog.text
        caplog.clear()


@pytest.mark.parametrize(
    "kept", [b"", b"{", b'{"lists": []}', b'{"lists": [{"body": "x", "signatures": {}}]}']
)
def test_a_damaged_list_on_disk_costs_nothing_but_asking_again(home, mirrors, kept):
    (home.path / MIRROR_LIST_FILE).write_bytes(kept)
    client = FailoverClient.from_state_dir(home)
    assert client.mirror_lists == [] and client.select_mirror() == mirrors[2].identity.key
    client.close()


def test_list_of_another_site_is_ignored(home, mirrors):
    other = signed_list(1, list_entry(Identity(b"z" * 32), "https://elsewhere.example.org"))
    (home.path / MIRROR_LIST_FILE).write_bytes(
        MirrorLists(lists=[other]).model_dump_json().encode()
    )
    client = FailoverClient.from_state_dir(home)
    assert client.select_mirror() == mirrors[2].identity.key
    client.close()


def test_entering_asks_one_mirror_after_the_other(mirrors, client):
    client.join_run(RUN, [])
    client.receive_mirror_lists(mirrors[2].lists)
    mirrors[0].close()
    mirrors[1].failing = (404, "there is no run of that name here")
    assert client.join_run(RUN, []).run.id == RUN and client.mirror == mirrors[2].identity.key
    mirrors[2].failing = (403, "its owner says no")
    with pytest.raises(CoordinatorError, match=r"no run of that name|owner says no"):
        client.join_run(RUN, [])
    for mirror in mirrors[1:]:
        mirror.close()
    with pytest.raises(CoordinatorUnreachableError):
        client.join_run(RUN, [])


# ---- answers that are none


class Strange(ThreadingHTTPServer):
    """Answers each request by `body`, a piece at a time."""

    def __init__(self, status: int, pieces: Callable[[], object]):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.end_headers()
                try:
                    for piece in pieces():
                        self.wfile.write(piece)
                except OSError:
                    return

            do_POST = do_GET

            def log_message(self, *words) -> None: ...

        super().__init__(("127.0.0.1", 0), Handler)
        self.daemon_threads = True
        threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()


def endless():
    while True:
        yield b"x" * 65536


@pytest.mark.parametrize(
    ("pieces", "sentence"),
    [
        (endless, "was cut off"),
        (lambda: [b"<html>hello</html>"], "not Barnraise's API"),
        (lambda: [b'{"lists": [{"bo'], "not Barnraise's API"),
        (lambda: [], "not Barnraise's API"),
    ],
)
def test_a_mirror_that_answers_with_something_else_is_left_for_the_next(
    mirrors, client, reporter, pieces, sentence
):
    waits_for(lambda: client.newest_list)
    strange = Strange(200, pieces)
    url = f"http://127.0.0.1:{strange.server_address[1]}"
    moved = mirrors[0].listed.model_copy(update={"url": url})
    client.receive_mirror_lists([signed_list(2, moved, mirrors[1].listed, mirrors[2].listed)])
    waits_for(lambda: mirrors[1].reports)
    strange.shutdown()
    strange.server_close()


# ---- the selector, alone


def test_waits_grow_up_to_a_bound_and_spread(monkeypatch):
    monkeypatch.undo()
    selector = MirrorSelector("m" * 64)
    selector.order = ["a", "b"]
    ends = set()
    for _ in range(100):
        selector.mark_failed("a", 1000.0)
        ends.add(selector.next_retry_at())
        assert 1000.0 < selector.next_retry_at() <= 1000.0 + 1.5 * failover_module.LONGEST_WAIT
        assert selector.pick() == "b" and not selector.due_for_retry(1000.0)
    assert len(ends) > 90, "machines do not come back all at once"
    selector.mark_failed("b", 1000.0)
    assert selector.pick() == "b", "of two that are away, the one to look after first"
    assert selector.due_for_retry(1e9) == ["a", "b"]
    selector.mark_reachable("a")
    assert (
        selector.pick() == "a"
        and selector.next_retry_at() < 1000.0 + 1.5 * failover_module.FIRST_WAIT
    )
