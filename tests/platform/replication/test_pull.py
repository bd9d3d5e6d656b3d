"""Test pulling from another mirror over real HTTP, with right and with malformed answers."""

import time

import pytest
from django.test import Client
from helpers.mirrors.event_log_builder import LogBuilder, count_stored
from helpers.mirrors.fake_mirror import FakeMirror, local_entry, pull
from helpers.mirrors.mirror_lists import signed_list
from helpers.network.certificates import create_server_context

from barnraise.protocol import messages
from barnraise.protocol.mirror_list import MirrorLists
from barnraise.protocol.signing import Identity, digest
from coordinator.eventlog.models import ForkProof, LogEvent, Origin, PeerClock
from coordinator.eventlog.projection import state_hash
from coordinator.lib import site_identity
from coordinator.replication import client, log_limits, mirror_list, slow_mirrors, tasks
from coordinator.replication import pull as pull_module
from coordinator.replication.models import MirrorListVersion, PeerStatus
from coordinator.replication.protocol import ForkEvidence, LogPart

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("valkey")]
STRANGER = Identity(b"x" * 32)


@pytest.fixture
def short_limits(monkeypatch):
    """Shorten the client's limits, so that tests need not wait for the usual ones."""
    monkeypatch.setattr(client, "READ_SECONDS", 1.0)
    monkeypatch.setattr(client, "ANSWER_SECONDS", 1.5)
    monkeypatch.setattr(client, "MAX_ANSWER_BYTES", 1 << 20)


# ---- pulling


def test_log_is_pulled_page_by_page_and_only_once(fake_mirror, log):
    fake_mirror.page_size = 3
    assert pull(fake_mirror).stored == 10 and count_stored(log) == 10
    before = len(fake_mirror.requests)
    assert pull(fake_mirror) == pull_module.PullResult()
    assert fake_mirror.requests[before:] == ["GET /mirrors/heads"]
    log.append("weather.seen", 1, {"rain": 0})
    assert pull(fake_mirror).stored == 1
    status = PeerStatus.objects.get(pk=fake_mirror.identity.key)
    assert status.last_error == "" and status.last_seen is not None


def test_clock_offset_is_stored_from_signed_heads(fake_mirror):
    fake_mirror.clock_offset = 3600.0
    pull(fake_mirror)
    assert PeerClock.objects.get(pk=fake_mirror.identity.key).offset_seconds == pytest.approx(
        3600, abs=5
    )


def test_late_heads_are_no_wrong_clock(fake_mirror):
    answer_at_once = fake_mirror.routes["GET /mirrors/heads"]

    def answer_late(query, who):
        answer = answer_at_once(query, who)
        time.sleep(0.5)
        return answer

    fake_mirror.routes["GET /mirrors/heads"] = answer_late
    pull(fake_mirror)
    assert PeerClock.objects.get(pk=fake_mirror.identity.key).offset_seconds == 0.0


def test_mirror_with_a_common_protocol_version_is_pulled_others_refused(fake_mirror, log):
    fake_mirror.protocols = [2, 1]
    assert pull(fake_mirror).stored == 10
    fake_mirror.protocols = [3, 2]
    assert (
        "speaks the protocols [3, 2] between mirrors, and this site 1"
        in pull(fake_mirror).refused[0]
    )


def test_pulled_fork_proof_truncates_the_log(fake_mirror, log):
    pull(fake_mirror)
    second = log.sign("weather.seen", 4, {"rain": 99}, seq=5, prev=digest(log.events[3].body))
    fake_mirror.proofs = [ForkEvidence(first=log.events[4], second=second)]
    pull(fake_mirror)
    assert ForkProof.objects.get().seq == 5
    assert LogEvent.objects.filter(origin=log.origin, accepted=True).count() == 4


def test_mirror_that_replaces_an_event_proves_its_own_fork(fake_mirror, log):
    pull(fake_mirror)
    log.events[9] = log.sign(
        "weather.seen", 8, {"rain": 99}, seq=10, prev=digest(log.events[8].body)
    )
    pull(fake_mirror)
    assert ForkProof.objects.get().seq == 10
    assert LogEvent.objects.filter(origin=log.origin, accepted=True).count() == 9


def test_other_mirrors_get_one_notice_for_many_changes(fake_mirror, valkey, settings):
    tasks.notify_mirrors()
    assert fake_mirror.requests == ["POST /mirrors/change-notice"]
    sent = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks.notify_mirrors, "apply_async", lambda **options: sent.append(options))
        for _ in range(5):
            tasks.on_event_recorded(LogEvent)
    assert len(sent) == 1


def test_status_reports_whether_each_mirror_is_in_sync(fake_mirror, log):
    (status,) = Client().get("/status").json()["mirrors"]
    assert (status["in_sync"], status["last_seen"], status["last_error"]) == (None, None, "")
    pull(fake_mirror)
    (status,) = Client().get("/status").json()["mirrors"]
    assert status["in_sync"] is (state_hash() == "0" * 64)
    assert status["last_seen"] > 0
    assert status["url"] == fake_mirror.url


# ---- failures and refusals


def test_log_with_a_hole_is_refused_and_later_pulled_whole(fake_mirror, log):
    serve_whole_log = fake_mirror.routes[fake_mirror.log_route]
    fake_mirror.routes[fake_mirror.log_route] = lambda query, who: LogPart(
        events=[*log.events[:4], *log.events[5:]]
    )
    assert "has a hole: event 6 came, and 4 is the last" in pull(fake_mirror).refused[0]
    assert count_stored(log) == 0, "events before the hole were stored"
    fake_mirror.routes[fake_mirror.log_route] = serve_whole_log
    assert pull(fake_mirror).stored == 10 and count_stored(log) == 10


def test_pull_continues_after_the_pages_stored_before_a_broken_one(fake_mirror, log):
    fake_mirror.page_size = 4
    serve_page = fake_mirror.page

    def serve_broken_pages(query, who):
        page = serve_page(query, who)
        if int(query["after"]) < 4:
            return page
        return 200, page.model_dump_json().encode()[:-40]

    fake_mirror.routes[fake_mirror.log_route] = serve_broken_pages
    assert "it may be cut off" in pull(fake_mirror).refused[0] and count_stored(log) == 4
    fake_mirror.routes[fake_mirror.log_route] = serve_page
    assert pull(fake_mirror).stored == 6


@pytest.mark.parametrize("fault", ["altered", "a stranger's", "cut short", "nothing"])
def test_page_with_false_events_is_refused_whole(fake_mirror, log, fault):
    forged = messages.Signed(
        key=log.identity.key, body=log.events[3].body.replace("2", "3"), signature="0" * 128
    )
    stranger = LogBuilder(seed=3)
    events = {
        "altered": [*log.events[:3], forged],
        "a stranger's": stranger.events,
        "cut short": log.events[:3],
        "nothing": [],
    }[fault]
    fake_mirror.routes[fake_mirror.log_route] = lambda query, who: LogPart(
        events=events[int(query["after"]) :]
    )
    result = pull(fake_mirror)
    assert count_stored(log) == (3 if fault == "cut short" else 0)
    sentence = {
        "altered": "its signature does not match",
        "a stranger's": "which is no mirror of the list",
        "cut short": "",
        "nothing": "has 10 events of log",
    }[fault]
    assert sentence in "".join(result.refused)
    assert not Origin.objects.filter(pk=stranger.origin).exists()


def send_endlessly():
    while True:
        yield b"x" * 65536


def send_slowly():
    yield b'{"key"'
    for _ in range(100):
        time.sleep(0.2)
        yield b" "


def send_nothing_in_time():
    time.sleep(1.5)
    yield b"{}"


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (lambda: (200, send_endlessly()), "sent more than 1,048,576 bytes and was cut off"),
        (
            lambda: (200, send_slowly()),
            "takes more than 1.5 seconds for one answer and was cut off",
        ),
        (lambda: (200, send_nothing_in_time()), "does not answer"),
        (
            lambda: (200, b"<html><title>Welcome</title></html>"),
            "something that is not Barnraise's API",
        ),
        (lambda: (200, b'{"key": "ab'), "it may be cut off"),
        (lambda: (200, b""), "something that is not Barnraise's API"),
        (
            lambda: (502, b"<html>Bad gateway</html>"),
            "answered 502 with something that is not Barnraise's API",
        ),
        (lambda: (503, b'{"error": "the database is away"}'), "refuses: the database is away"),
    ],
)
@pytest.mark.parametrize("route", ["GET /mirrors/heads", "the log"])
@pytest.mark.usefixtures("short_limits")
def test_malformed_answer_names_the_mirror_and_changes_nothing(
    fake_mirror, log, monkeypatch, route, answer, sentence
):
    route = fake_mirror.log_route if route == "the log" else route
    correct_route = fake_mirror.routes[route]
    fake_mirror.routes[route] = lambda query, who: answer()
    result = pull(fake_mirror)
    assert sentence in result.refused[0] and result.refused[0].startswith("the small one")
    assert count_stored(log) == 0 and PeerStatus.objects.get().last_error == result.refused[0][:300]
    fake_mirror.routes[route] = correct_route
    monkeypatch.undo()
    assert pull(fake_mirror).stored == 10 and PeerStatus.objects.get().last_error == ""


def test_failing_mirror_is_retried_later_each_time_and_after_a_notice(fake_mirror, log):
    key = fake_mirror.identity.key
    right = fake_mirror.routes["GET /mirrors/heads"]
    fake_mirror.routes["GET /mirrors/heads"] = lambda query, who: (502, b"<html>")
    assert pull_module.pull_from_all()[key].refused
    assert pull_module.pull_from_all() == {}, "a failing mirror was asked again at once"
    status = PeerStatus.objects.get()
    waits = [
        pull_module.retry_delay(PeerStatus(key=key, failures=n)).total_seconds()
        for n in (1, 4, 100)
    ]
    assert status.failures == 1
    assert 2.5 <= waits[0] <= 5
    assert 20 <= waits[1] <= 40
    assert 60 <= waits[2] <= 120
    fake_mirror.routes["GET /mirrors/heads"] = right
    tasks.pull_task(key)
    assert count_stored(log) == 10 and PeerStatus.objects.get().failures == 0
    assert pull_module.pull_from_all() == {key: pull_module.PullResult()}


def test_unreachable_mirror_is_probed_and_pulled_once_it_is_back(
    fake_mirror, log, short_limits, monkeypatch
):
    monkeypatch.setattr(pull_module, "MIN_RETRY_SECONDS", pull_module.MAX_RETRY_SECONDS)
    correct_routes = dict(fake_mirror.routes)
    fake_mirror.routes |= dict.fromkeys(
        ("GET /mirror", "GET /mirrors/heads"), lambda query, who: (200, send_nothing_in_time())
    )
    assert "does not answer" in pull_module.pull_from_all()[fake_mirror.identity.key].refused[0]
    with monkeypatch.context() as impatient:
        impatient.setattr(client, "PROBE_SECONDS", 0.5)
        assert pull_module.pull_from_all() == {}, "an unreachable mirror was pulled"
    request_count = len(fake_mirror.requests)
    tasks.notify_mirrors()
    assert "POST /mirrors/change-notice" not in fake_mirror.requests[request_count:], (
        "an unreachable mirror was notified"
    )
    fake_mirror.routes = correct_routes
    assert pull_module.pull_from_all()[fake_mirror.identity.key].stored == 10
    tasks.notify_mirrors()
    assert fake_mirror.requests[-1] == "POST /mirrors/change-notice"


def test_slow_mirror_is_cut_off_and_left_alone_for_a_while(fake_mirror, log, monkeypatch):
    """Each answer comes in time; all together would hold up the tasks that wait behind."""
    key = fake_mirror.identity.key
    monkeypatch.setattr(pull_module, "PULL_SECONDS", 2.5)
    monkeypatch.setattr(slow_mirrors, "FREE_SECONDS", 0.5)
    fake_mirror.page_size = 1
    page = fake_mirror.routes[fake_mirror.log_route]

    def answer_slowly(query, who):
        time.sleep(0.4)
        return page(query, who)

    fake_mirror.routes[fake_mirror.log_route] = answer_slowly
    result = pull_module.pull_from_all()[key]
    assert 0 < result.stored < 10 and "kept this site waiting for 2.5" in result.refused[0]
    assert PeerStatus.objects.get().failures == 0, "what came is no failure"
    requests = len(fake_mirror.requests)
    assert pull_module.pull_from_all() == {}
    tasks.pull_task(key)
    tasks.notify_mirrors()
    assert len(fake_mirror.requests) == requests, "a slow mirror was called again at once"
    fake_mirror.routes[fake_mirror.log_route] = page
    pull(fake_mirror)
    assert count_stored(log) == 10, "an operator's pull waits as long as it takes"


def test_mirror_gets_as_long_a_rest_as_it_wasted_time():
    assert slow_mirrors.rest_seconds(0.9) == 0
    assert slow_mirrors.rest_seconds(2.0) == 2
    assert slow_mirrors.rest_seconds(10.0) == 90


def test_mirror_that_writes_without_end_is_put_off_until_tomorrow(fake_mirror, log, monkeypatch):
    key = fake_mirror.identity.key
    monkeypatch.setattr(log_limits, "MAX_DAILY_BYTES", sum(len(e.body) for e in log.events[:7]))
    fake_mirror.page_size = 3
    result = pull_module.pull_from_all()[key]
    assert result.stored == 6 and "the rest is pulled tomorrow" in result.refused[0]
    assert pull_module.pull_from_all()[key].stored == 0
    assert pull(fake_mirror).stored == 4


def test_mirror_is_pulled_once_its_database_is_back(fake_mirror, log, monkeypatch):
    monkeypatch.setattr(pull_module, "MIN_RETRY_SECONDS", pull_module.MAX_RETRY_SECONDS)
    key = fake_mirror.identity.key
    right = fake_mirror.routes["GET /mirrors/heads"]
    fake_mirror.routes["GET /mirrors/heads"] = lambda query, who: (
        503,
        b'{"error": "the database is away"}',
    )
    assert "the database is away" in pull_module.pull_from_all()[key].refused[0]
    fake_mirror.routes["GET /mirrors/heads"] = right
    assert pull_module.pull_from_all()[key].stored == 10


def test_mirror_list_works_without_valkey(fake_mirror, monkeypatch, settings):
    away = {
        "BACKEND": "django.core.cache.backends.redis.RedisCache",
        "LOCATION": "redis://127.0.0.1:1/0",
    }
    settings.CACHES = {"default": away}
    tasks.on_event_recorded(LogEvent)
    assert mirror_list.current_version()[0] == 1
    assert mirror_list.ingest_lists([signed_list(2, local_entry(), fake_mirror.list_entry)])


def test_heads_by_another_key_or_for_another_site_are_refused(fake_mirror):
    fake_mirror.routes["GET /mirrors/heads"] = lambda query, who: STRANGER.sign(
        "heads", fake_mirror.heads(who)
    )
    assert "is signed by" in pull(fake_mirror).refused[0]
    fake_mirror.routes["GET /mirrors/heads"] = lambda query, who: fake_mirror.identity.sign(
        "heads", fake_mirror.heads(STRANGER.key)
    )
    assert "not for this site" in pull(fake_mirror).refused[0]


def test_mirror_with_an_untrusted_certificate_is_refused(log, tmp_path):
    small = FakeMirror(log, create_server_context(tmp_path / "tls.pem", "elsewhere.example.org"))
    small.publish_list()
    assert "certificate verify failed" in pull(small).refused[0] and count_stored(log) == 0
    small.close()


# ---- the list


def test_pulled_list_withdraws_late_events_of_an_expelled_mirror(fake_mirror, log):
    pull(fake_mirror)
    fake_mirror.lists = [fake_mirror.sign_expulsion(last={log.origin: 6}, reason="it lied")]
    pull(fake_mirror)
    assert mirror_list.newest_list().version == 2 and mirror_list.other_mirrors() == []
    assert LogEvent.objects.filter(origin=log.origin, accepted=True).count() == 6
    assert "it lied" in Origin.objects.get(pk=log.origin).truncation_reason


def test_log_not_named_by_an_expulsion_is_withdrawn(fake_mirror, log):
    pull(fake_mirror)
    mirror_list.ingest_lists([fake_mirror.sign_expulsion()])
    assert not LogEvent.objects.filter(origin=log.origin, accepted=True).exists()
    assert mirror_list.trusted_keys(log.origin) == {site_identity.identity().key}


@pytest.mark.parametrize(
    ("create_list", "sentence"),
    [
        (
            lambda fake_mirror: signed_list(2, local_entry(), fake_mirror.list_entry, expires=5.0),
            "expired",
        ),
        (
            lambda fake_mirror: signed_list(2, local_entry(), fake_mirror.list_entry, signers=1),
            "signed by 1 of the roots of list 1",
        ),
        (lambda fake_mirror: signed_list(2, local_entry()), "says nothing of the mirror"),
        (
            lambda fake_mirror: signed_list(1, fake_mirror.list_entry, local_entry()),
            "two different mirror lists 1",
        ),
    ],
)
def test_invalid_list_is_refused_and_the_log_is_pulled_anyway(
    fake_mirror, log, create_list, sentence
):
    wrong = create_list(fake_mirror)
    fake_mirror.lists = [wrong]
    fake_mirror.routes["GET /mirrors/list"] = lambda query, who: MirrorLists(lists=[wrong])
    fake_mirror.routes["GET /mirrors/heads"] = lambda query, who: fake_mirror.identity.sign(
        "heads", fake_mirror.heads(who, mirrors=7)
    )
    result = pull(fake_mirror)
    assert sentence in result.refused[0] and result.stored == 10
    assert [version.version for version in MirrorListVersion.objects.all()] == [1]
