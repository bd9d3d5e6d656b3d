"""A machine reports to one of several mirrors, which fail, lag, lie or return, over real HTTP."""

import json
import time
from collections.abc import Callable
from functools import partial

import pytest
from helpers import wait_for
from helpers.mirrors import mirror_lists
from helpers.mirrors.mirror_lists import signed_list
from helpers.network.local_server import LocalServer, QuietHandler
from helpers.worker.fake_coordinator import MACHINE, RUN, FakeCoordinator, enrol

from barnraise.coordinator_client import failover as failover_module
from barnraise.coordinator_client.failover import (
    MIRROR_LIST_FILE,
    FailoverClient,
    MirrorSelector,
)
from barnraise.coordinator_client.reporter import Reporter, ReportSpool
from barnraise.errors import CoordinatorError, CoordinatorUnreachableError
from barnraise.protocol import coordinator_messages
from barnraise.protocol.clock import median_clock_offset
from barnraise.protocol.enums import RunStatus
from barnraise.protocol.messages import Peer
from barnraise.protocol.mirror_list import (
    Expulsion,
    MirrorLists,
    SignedMirrorList,
    parse_list,
    rank_mirrors,
)
from barnraise.protocol.reports import NO_FIGURES, Report
from barnraise.protocol.signing import Identity, digest
from barnraise.spec import ModelSpec, RunSpec, TextSpec
from barnraise.state_dir import StateDir

wait_until = partial(wait_for.wait_until, seconds=15.0)


class Mirror(FakeCoordinator):
    """One of several mirrors.

    Attributes:
        lists: The mirror lists that it serves.
        join_requests: The requests of machines that joined.
        anchors: (digest of a version vector, digest of the anchor) that it calls confirmed.
    """

    def __init__(self, number: int):
        super().__init__(Identity(bytes([number]) * 32))
        self.lists: list[SignedMirrorList] = []
        self.join_requests: list[dict] = []
        self.anchors: list[tuple[str, str]] = []
        self.routes[f"POST /runs/{RUN}/join"] = self.join_run
        for after in range(4):
            self.routes[f"GET /mirrors/list?after={after}"] = lambda body, after=after: MirrorLists(
                lists=[signed for signed in self.lists if parse_list(signed).version > after]
            )

    def join_run(self, body: bytes):
        if self.failing:
            return self.failing[0], coordinator_messages.Problem(error=self.failing[1])
        self.join_requests.append(json.loads(body))
        spec = RunSpec(ModelSpec(2, 32, 2, 32, 256), TextSpec(tokenizer="bytes")).to_json()
        run = coordinator_messages.RunView(
            id=RUN, slug="a-run", name="A run", status=RunStatus.TRAINING, spec=spec
        )
        peers = [Peer(key=self.identity.key, addresses=["127.0.0.1:1"])]
        return coordinator_messages.JoinReply(
            run=run,
            ticket=None,
            directive=self.signed_directive(),
            peers=peers,
            confirmed_anchors=[
                coordinator_messages.ConfirmedAnchor(vector=vector, digest=anchor, people=2)
                for vector, anchor in self.anchors
            ],
        )

    def publish_list(self, signed: SignedMirrorList) -> None:
        """Serve this list alone, and announce it in directives."""
        self.lists = [signed]
        self.directive |= {
            "mirror_list_version": parse_list(signed).version,
            "mirror_list_digest": digest(signed.body),
        }

    @property
    def list_entry(self):
        return mirror_lists.list_entry(self.identity, self.url)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(failover_module, "FIRST_WAIT", 0.4)
    monkeypatch.setattr(failover_module, "LONGEST_WAIT", 0.8)


@pytest.fixture
def home(tmp_path) -> StateDir:
    return StateDir(tmp_path / "home")


@pytest.fixture
def mirrors(home):
    """Start three mirrors of one list, in this machine's order of preference.

    The machine is enrolled at the last one.
    """
    started = [Mirror(number) for number in (1, 2, 3)]
    ranked = rank_mirrors(home.identity.key, [mirror.list_entry for mirror in started])
    order = [entry.key for entry in ranked]
    started.sort(key=lambda mirror: order.index(mirror.identity.key))
    signed = signed_list(1, *(mirror.list_entry for mirror in started))
    for mirror in started:
        mirror.publish_list(signed)
    enrol(home, started[2].url, started[2].identity.key)
    yield started
    for mirror in started:
        mirror.close()


@pytest.fixture
def client(home, mirrors):
    failover_client = FailoverClient.from_state_dir(home)
    yield failover_client
    failover_client.close()


@pytest.fixture
def reporter(home, client, tmp_path):
    """Start a reporter that reports five times a second, to any of the mirrors."""
    first = coordinator_messages.Directive(
        run=RUN, machine=MACHINE, status=RunStatus.TRAINING, report_every=0.2, issued=0
    )
    client.join_run(RUN, [])
    started = Reporter(client, RUN, MACHINE, first, ReportSpool(tmp_path / "spool.sqlite"))
    started.update_figures(Report(seq=1, at=0, addresses=["127.0.0.1:4000"], **dict(NO_FIGURES)))
    started.start()
    yield started
    started.stop()


def test_client_learns_all_mirrors_and_reports_to_the_preferred_one(home, mirrors, reporter):
    wait_until(lambda: mirrors[0].reports)
    stored = MirrorLists.model_validate_json((home.path / MIRROR_LIST_FILE).read_bytes())
    assert parse_list(stored.lists[-1]).version == 1
    restarted = FailoverClient.from_state_dir(home)
    assert restarted.select_mirror() == mirrors[0].identity.key


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [([], 0), ([3600], 3600), ([3600, 0], 0), ([-90, -88], -88), ([0, 3600, 1], 1)],
)
def test_median_of_the_mirrors_clocks_is_the_machines_time(offsets, expected):
    assert median_clock_offset(offsets) == expected


def test_wrong_clock_of_one_mirror_does_not_set_the_machines_time(mirrors, client, reporter):
    """Else all peers would hold back what the machine publishes until that time."""
    wait_until(lambda: all(mirror.join_requests for mirror in mirrors))
    mirrors[0].clock_offset = 3600.0
    number = max(mirrors[0].reports, default=0)
    wait_until(lambda: max(mirrors[0].reports, default=0) > number + 1)
    assert client.mirror == mirrors[0].identity.key, "it reports to that mirror, with its time"
    assert abs(client.now() - time.time()) < 60


def test_wrong_clock_of_the_machine_gives_way_to_the_mirrors(home, mirrors):
    path = home.path / MIRROR_LIST_FILE
    client = FailoverClient(
        home.membership, home.identity, path, clock=lambda: time.time() - 86_400
    )
    try:
        client.join_run(RUN, [])
        assert abs(client.now() - time.time()) < 60
    finally:
        client.close()


def test_client_announces_itself_to_every_mirror_and_collects_peers(mirrors, reporter):
    wait_until(
        lambda: all(
            any(request["addresses"] for request in mirror.join_requests) for mirror in mirrors[:2]
        )
    )
    peers: set[str] = set()

    def has_two_peers() -> bool:
        peers.update(peer.key for peer in reporter.pop_peers())
        return len(peers) >= 2

    wait_until(has_two_peers)


def test_unconfirmed_reports_go_to_the_next_mirror_and_back_later(mirrors, reporter):
    wait_until(lambda: mirrors[0].reports)
    mirrors[0].close()
    wait_until(lambda: mirrors[1].reports)
    before = len(mirrors[0].reports)
    assert min(mirrors[1].reports) == 1, "it acknowledged nothing, so all reports are sent again"
    mirrors[0].open()
    wait_until(lambda: len(mirrors[0].reports) > before)
    assert sorted(mirrors[0].reports) == list(range(1, len(mirrors[0].reports) + 1)), (
        "nothing is missing"
    )


def test_reports_while_no_mirror_answers_are_spooled_and_none_is_lost(mirrors, reporter):
    wait_until(lambda: mirrors[0].reports)
    for mirror in mirrors:
        mirror.close()
    time.sleep(1.0)
    mirrors[1].open()
    wait_until(lambda: len(mirrors[1].reports) > 4)
    assert sorted(mirrors[1].reports) == list(range(1, len(mirrors[1].reports) + 1))
    assert reporter.refused is None


@pytest.mark.parametrize("status", [401, 403, 404])
def test_reporter_refused_by_one_mirror_alone_goes_on(mirrors, reporter, status):
    wait_until(lambda: mirrors[0].reports)
    mirrors[0].failing = (status, "this machine is not in the run")
    wait_until(lambda: mirrors[1].reports)
    assert reporter.refused is None


def test_reporter_refused_by_most_mirrors_stops(mirrors, reporter):
    # A first visit that finds a mirror failing would keep the reporter from asking it.
    wait_until(lambda: mirrors[0].reports and all(mirror.join_requests for mirror in mirrors))
    for mirror in mirrors[:2]:
        mirror.failing = (403, "this machine was revoked")
    wait_until(lambda: reporter.refused)
    assert "this machine was revoked" in reporter.refused


def test_directive_of_the_next_mirror_counts_despite_older_stamp(mirrors, reporter):
    mirrors[0].issued = 9e9
    wait_until(lambda: reporter.directive.issued == 9e9)
    mirrors[0].close()
    mirrors[1].directive |= {"status": RunStatus.PAUSED}
    wait_until(lambda: reporter.directive.status is RunStatus.PAUSED)


def test_newer_list_is_adopted_and_the_expelled_mirror_left(mirrors, client, reporter):
    wait_until(lambda: mirrors[0].reports and client.newest_list)
    newer = signed_list(
        2,
        mirrors[0].list_entry.model_copy(update={"expelled": Expulsion(at=1.0)}),
        mirrors[1].list_entry,
        mirrors[2].list_entry,
    )
    mirrors[2].lists = [newer]
    client.visit_mirrors_now()
    wait_until(lambda: client.newest_list.version == 2)
    wait_until(lambda: mirrors[1].reports)
    assert mirrors[0].identity.key not in client.keys


@pytest.mark.parametrize("signers", [0, 1])
def test_first_list_with_too_few_signatures_is_refused(mirrors, client, signers, caplog):
    for mirror in mirrors:
        mirror.publish_list(
            signed_list(1, *(mirror.list_entry for mirror in mirrors), signers=signers)
        )
    client.join_run(RUN, [])
    client.receive_mirror_lists(mirrors[2].lists)
    assert client.newest_list is None and f"signed by {signers} of" in caplog.text
    assert client.select_mirror() == mirrors[2].identity.key


def test_first_list_unannounced_by_the_own_mirror_is_refused(mirrors, client, caplog):
    client.join_run(RUN, [])
    client.receive_mirror_lists([signed_list(1, mirrors[0].list_entry)])
    assert client.newest_list is None and "which this machine's mirror names" in caplog.text


ELSEWHERE = mirror_lists.list_entry(Identity(b"z" * 32), "https://elsewhere.example.org")


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", '{"lists": []}', '{"lists": [{"body": "x", "signatures": {}}]}'),
        MirrorLists(lists=[signed_list(1, ELSEWHERE)]).model_dump_json(),
    ],
)
def test_damaged_list_file_or_list_of_another_site_is_ignored(home, mirrors, content):
    (home.path / MIRROR_LIST_FILE).write_text(content)
    client = FailoverClient.from_state_dir(home)
    assert client.select_mirror() == mirrors[2].identity.key
    client.close()


def test_join_request_goes_to_one_mirror_after_the_other(mirrors, client):
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


# ---- invalid answers


def serve_pieces(pieces: Callable[[], object]) -> LocalServer:
    """Answer each request with what `pieces` yields, a piece at a time."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            try:
                for piece in pieces():
                    self.wfile.write(piece)
            except OSError:
                return

        do_POST = do_GET

    return LocalServer(Handler)


def endless_body():
    while True:
        yield b"x" * 65536


@pytest.mark.parametrize(
    ("pieces", "sentence"),
    [
        (endless_body, "was cut off"),
        (lambda: [b"<html>hello</html>"], "not Barnraise's API"),
        (lambda: [b'{"lists": [{"bo'], "not Barnraise's API"),
        (lambda: [], "not Barnraise's API"),
    ],
)
def test_mirror_with_an_invalid_answer_is_left_for_the_next(
    mirrors, client, reporter, pieces, sentence
):
    wait_until(lambda: client.newest_list)
    server = serve_pieces(pieces)
    moved = mirrors[0].list_entry.model_copy(update={"url": server.url})
    client.receive_mirror_lists(
        [signed_list(2, moved, mirrors[1].list_entry, mirrors[2].list_entry)]
    )
    wait_until(lambda: mirrors[1].reports)
    server.close()


# ---- the selector


def test_selector_retries_later_up_to_a_bound_and_at_random_times(monkeypatch):
    monkeypatch.undo()
    selector = MirrorSelector("m" * 64)
    selector.order = ["a", "b"]
    retry_times = set()
    for _ in range(100):
        selector.mark_failed("a", 1000.0)
        retry_times.add(selector.next_retry_at())
        assert 1000.0 < selector.next_retry_at() <= 1000.0 + 1.5 * failover_module.LONGEST_WAIT
        assert selector.pick() == "b" and not selector.due_for_retry(1000.0)
    assert len(retry_times) > 90, "machines do not return all at once"
    selector.mark_failed("b", 1000.0)
    assert selector.pick() == "b", "of two mirrors that failed, it picks the one to retry first"
    assert selector.due_for_retry(1e9) == ["a", "b"]
    selector.mark_reachable("a")
    assert selector.pick() == "a"
    assert selector.next_retry_at() < 1000.0 + 1.5 * failover_module.FIRST_WAIT


def test_lying_mirror_alone_confirms_no_anchor(mirrors, client, reporter):
    """Let one mirror of three name weights of its choice; two name the honest ones."""
    honest, false = ("1" * 64, "2" * 64), ("3" * 64, "4" * 64)
    mirrors[0].anchors = [false, honest]
    mirrors[1].anchors = [honest]
    client.request_anchors()
    wait_until(lambda: client.confirmed_anchors(RUN))
    assert client.confirmed_anchors(RUN) == dict([honest])
    mirrors[0].anchors = [(honest[0], false[1])]
    client.request_anchors()
    wait_until(lambda: not client.confirmed_anchors(RUN))


def test_only_mirror_confirms_an_anchor_alone(home, mirrors):
    mirrors[2].lists = []
    mirrors[2].directive |= {"mirror_list_version": 0, "mirror_list_digest": None}
    mirrors[2].anchors = [("1" * 64, "2" * 64)]
    alone = FailoverClient.from_state_dir(home)
    alone.join_run(RUN, [])
    assert alone.confirmed_anchors(RUN) == {"1" * 64: "2" * 64}
    alone.close()
