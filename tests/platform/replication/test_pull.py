"""Test pulling from another mirror over real HTTP, with right and with malformed answers."""

import ssl
import time
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from django.test import Client
from helpers.event_log_builder import LogBuilder, count_stored
from helpers.fake_mirror import FakeMirror, local_entry, pull
from helpers.mirror_lists import signed_list

from barnraise.errors import MirrorListError
from barnraise.protocol import messages
from barnraise.protocol.mirror_list import Expulsion, MirrorLists
from barnraise.protocol.signing import Identity, digest
from coordinator.eventlog.models import ForkProof, LogEvent, Origin, PeerClock
from coordinator.eventlog.projection import state_hash
from coordinator.lib import site_identity
from coordinator.replication import client, mirror_list, tasks
from coordinator.replication import pull as pull_module
from coordinator.replication.models import MirrorListVersion, PeerStatus
from coordinator.replication.protocol import ForkEvidence, LogPart

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("valkey")]
STRANGER = Identity(b"x" * 32)


@pytest.fixture
def short_limits(monkeypatch):
    """Shorten the client's limits, so that tests need not wait for the usual ones."""
    monkeypatch.setattr(client, "READ_SECONDS", 1.5)
    monkeypatch.setattr(client, "ANSWER_SECONDS", 2.0)
    monkeypatch.setattr(client, "MAX_ANSWER_BYTES", 1 << 20)


# ---- pulling


def test_another_mirrors_log_comes_here_page_by_page_and_once(fake_mirror, log):
    fake_mirror.page_size = 3
    assert pull(fake_mirror).stored == 10 and count_stored(log) == 10
    before = len(fake_mirror.requests)
    assert pull(fake_mirror) == pull_module.PullResult() and fake_mirror.requests[before:] == [
        "GET /mirrors/heads"
    ]
    log.append("weather.seen", 1, {"rain": 0})
    assert pull(fake_mirror).stored == 1
    standing = PeerStatus.objects.get(pk=fake_mirror.identity.key)
    assert standing.last_error == "" and standing.last_seen is not None


def test_clock_offset_is_stored_from_signed_heads(fake_mirror):
    fake_mirror.clock_offset = 3600.0
    pull(fake_mirror)
    assert PeerClock.objects.get(pk=fake_mirror.identity.key).offset_seconds == pytest.approx(
        3600, abs=5
    )


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
    assert (
        ForkProof.objects.get().seq == 5
        and LogEvent.objects.filter(origin=log.origin, accepted=True).count() == 4
    )


def test_mirror_that_replaces_an_event_proves_its_own_fork(fake_mirror, log):
    pull(fake_mirror)
    log.events[9] = log.sign(
        "weather.seen", 8, {"rain": 99}, seq=10, prev=digest(log.events[8].body)
    )
    pull(fake_mirror)
    assert ForkProof.objects.get().seq == 10
    assert LogEvent.objects.filter(origin=log.origin, accepted=True).count() == 9


def test_a_nudge_goes_to_the_others_once_for_many_changes(fake_mirror, valkey, settings):
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
    assert (
        status["in_sync"] is (state_hash() == "0" * 64)
        and status["last_seen"] > 0
        and status["url"] == fake_mirror.url
    )


# ---- what is not


def test_a_log_with_a_hole_is_refused_and_comes_whole_the_next_time(fake_mirror, log):
    whole = fake_mirror.routes[f"GET /mirrors/logs/{log.origin}"]
    fake_mirror.routes[f"GET /mirrors/logs/{log.origin}"] = lambda query, who: LogPart(
        events=[*log.events[:4], *log.events[5:]]
    )
    assert "has a hole: event 6 came, and 4 is the last" in pull(fake_mirror).refused[0]
    assert count_stored(log) == 0, "not even what came before the hole"
    fake_mirror.routes[f"GET /mirrors/logs/{log.origin}"] = whole
    assert pull(fake_mirror).stored == 10 and count_stored(log) == 10


def test_pull_continues_after_the_pages_stored_before_a_broken_one(fake_mirror, log):
    fake_mirror.page_size, whole = 4, fake_mirror.page

    def breaks(query, who):
        return (
            whole(query, who)
            if int(query["after"]) < 4
            else (200, whole(query, who).model_dump_json().encode()[:-40])
        )

    fake_mirror.routes[f"GET /mirrors/logs/{log.origin}"] = breaks
    assert "it may be cut off" in pull(fake_mirror).refused[0] and count_stored(log) == 4
    fake_mirror.routes[f"GET /mirrors/logs/{log.origin}"] = whole
    assert pull(fake_mirror).stored == 6


@pytest.mark.parametrize("what", ["altered", "a stranger's", "cut short", "nothing"])
def test_a_page_that_is_not_the_log_is_refused_whole(fake_mirror, log, what):
    forged = messages.Signed(
        key=log.identity.key, body=log.events[3].body.replace("2", "3"), signature="0" * 128
    )
    stranger = LogBuilder(seed=3)
    events = {
        "altered": [*log.events[:3], forged],
        "a stranger's": stranger.events,
        "cut short": log.events[:3],
        "nothing": [],
    }[what]
    fake_mirror.routes[f"GET /mirrors/logs/{log.origin}"] = lambda query, who: LogPart(
        events=events[int(query["after"]) :]
    )
    result = pull(fake_mirror)
    assert count_stored(log) == (3 if what == "cut short" else 0)
    sentence = {
        "altered": "its signature does not match",
        "a stranger's": "which is no mirror of the list",
        "cut short": "",
        "nothing": "has 10 events of log",
    }[what]
    assert (
        sentence in "".join(result.refused)
        and not Origin.objects.filter(pk=stranger.origin).exists()
    )


def endless():
    while True:
        yield b"x" * 65536


def dripping():
    yield b'{"key"'
    for _ in range(100):
        time.sleep(0.2)
        yield b" "


def silent():
    time.sleep(3)
    yield b"{}"


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (lambda: (200, endless()), "sent more than 1,048,576 bytes and was cut off"),
        (lambda: (200, dripping()), "takes more than 2 seconds for one answer and was cut off"),
        (lambda: (200, silent()), "does not answer"),
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
@pytest.mark.parametrize("where", ["GET /mirrors/heads", "the log"])
@pytest.mark.usefixtures("short_limits")
def test_malformed_answer_names_the_mirror_and_changes_nothing(
    fake_mirror, log, monkeypatch, where, answer, sentence
):
    where = f"GET /mirrors/logs/{log.origin}" if where == "the log" else where
    right = fake_mirror.routes[where]
    fake_mirror.routes[where] = lambda query, who: answer()
    result = pull(fake_mirror)
    assert sentence in result.refused[0] and result.refused[0].startswith("the small one")
    assert count_stored(log) == 0 and PeerStatus.objects.get().last_error == result.refused[0][:300]
    fake_mirror.routes[where] = right
    monkeypatch.undo()
    assert pull(fake_mirror).stored == 10 and PeerStatus.objects.get().last_error == ""


def test_unreachable_mirror_is_named_in_the_error(fake_mirror, log):
    fake_mirror.close()
    assert "does not answer" in pull(fake_mirror).refused[0]


def test_failing_mirror_is_retried_later_each_time_and_after_a_notice(fake_mirror, log):
    key, right = fake_mirror.identity.key, fake_mirror.routes["GET /mirrors/heads"]
    fake_mirror.routes["GET /mirrors/heads"] = lambda query, who: (502, b"<html>")
    assert pull_module.pull_from_all()[key].refused
    assert pull_module.pull_from_all() == {}, "not at once again: other tasks wait behind it"
    standing = PeerStatus.objects.get()
    waits = [
        pull_module.retry_delay(PeerStatus(key=key, failures=n)).total_seconds()
        for n in (1, 4, 100)
    ]
    assert (
        standing.failures == 1
        and 2.5 <= waits[0] <= 5
        and 20 <= waits[1] <= 40
        and 60 <= waits[2] <= 120
    )
    fake_mirror.routes["GET /mirrors/heads"] = right
    tasks.pull_task(key)
    assert count_stored(log) == 10 and PeerStatus.objects.get().failures == 0
    assert pull_module.pull_from_all() == {key: pull_module.PullResult()}


def test_unreachable_mirror_is_probed_and_pulled_once_it_is_back(
    fake_mirror, log, short_limits, monkeypatch
):
    monkeypatch.setattr(client, "PROBE_SECONDS", 0.5)
    monkeypatch.setattr(pull_module, "MIN_RETRY_SECONDS", pull_module.MAX_RETRY_SECONDS)
    right = dict(fake_mirror.routes)
    fake_mirror.routes |= dict.fromkeys(
        ("GET /mirror", "GET /mirrors/heads"), lambda query, who: (200, silent())
    )
    assert "does not answer" in pull_module.pull_from_all()[fake_mirror.identity.key].refused[0]
    assert pull_module.pull_from_all() == {}, "it does not open"
    asked = len(fake_mirror.requests)
    tasks.notify_mirrors()
    assert "POST /mirrors/change-notice" not in fake_mirror.requests[asked:], "nobody waits for it"
    fake_mirror.routes = right
    assert pull_module.pull_from_all()[fake_mirror.identity.key].stored == 10
    tasks.notify_mirrors()
    assert fake_mirror.requests[-1] == "POST /mirrors/change-notice"


def test_mirror_is_pulled_once_its_database_is_back(fake_mirror, log, monkeypatch):
    monkeypatch.setattr(pull_module, "MIN_RETRY_SECONDS", pull_module.MAX_RETRY_SECONDS)
    key, right = fake_mirror.identity.key, fake_mirror.routes["GET /mirrors/heads"]
    fake_mirror.routes["GET /mirrors/heads"] = lambda query, who: (
        503,
        b'{"error": "the database is away"}',
    )
    assert "the database is away" in pull_module.pull_from_all()[key].refused[0]
    fake_mirror.routes["GET /mirrors/heads"] = right
    assert pull_module.pull_from_all()[key].stored == 10


def test_while_valkey_is_away_the_list_is_known_and_a_change_goes_through(
    fake_mirror, monkeypatch, settings
):
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


def certificate(folder, host: str) -> ssl.SSLContext:
    """By nobody that anybody trusts."""
    key, name = (
        ec.generate_private_key(ec.SECP256R1()),
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)]),
    )
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "tls.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM) + private)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.pem")
    return context


def test_a_mirror_with_a_wrong_certificate_is_refused_by_that(log, tmp_path):
    small = FakeMirror(log, certificate(tmp_path, "elsewhere.example.org"))
    first = signed_list(1, local_entry(), small.list_entry)
    mirror_list.ingest_lists([first], vouched=first.digest)
    assert "certificate verify failed" in pull(small).refused[0] and count_stored(log) == 0
    small.close()


# ---- the list


def test_pulled_list_withdraws_late_events_of_an_expelled_mirror(fake_mirror, log):
    pull(fake_mirror)
    gone = fake_mirror.list_entry.model_copy(
        update={"expelled": Expulsion(at=1.0, last={log.origin: 6}, reason="it lied")}
    )
    fake_mirror.lists = [signed_list(2, local_entry(), gone)]
    pull(fake_mirror)
    assert mirror_list.newest_list().version == 2 and mirror_list.other_mirrors() == []
    assert LogEvent.objects.filter(origin=log.origin, accepted=True).count() == 6
    assert "it lied" in Origin.objects.get(pk=log.origin).truncation_reason


def test_a_log_that_an_expulsion_does_not_name_counts_for_nothing(fake_mirror, log):
    pull(fake_mirror)
    mirror_list.ingest_lists(
        [
            signed_list(
                2,
                local_entry(),
                fake_mirror.list_entry.model_copy(update={"expelled": Expulsion(at=1.0)}),
            )
        ]
    )
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
    found = pull(fake_mirror)
    assert sentence in found.refused[0] and found.stored == 10
    assert [each.version for each in MirrorListVersion.objects.all()] == [1]


def test_a_downgrade_is_refused(fake_mirror):
    mirror_list.ingest_lists([signed_list(3, local_entry(), fake_mirror.list_entry)])
    with pytest.raises(MirrorListError, match="older than 3"):
        mirror_list.ingest_lists([signed_list(2, local_entry(), fake_mirror.list_entry)])
