"""Replication over real HTTP: what another mirror has comes here whole or not at all, whatever it answers."""

import ssl
import time
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from django.core.management import CommandError, call_command
from django.test import Client
from mirror_lists import signed_list
from other_mirror import OtherMirror
from small_mirror import SmallMirror

from barnraise import wire
from barnraise.errors import ListError
from barnraise.identity import Identity, digest, opened
from barnraise.mirrors import Expulsion, Listed, Lists
from coordinator import mirror
from coordinator.mirrors import lists, particulars, peer, pulling, sealing, tasks
from coordinator.mirrors.models import Clock, List, LogEvent, Origin, Particulars, Proof, Standing
from coordinator.mirrors.state import state_hash
from coordinator.mirrors.wire import Heads, LogPart, Pair, Sealed, Wants

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("valkey")]
STRANGER = Identity(b"x" * 32)


def ourselves(**fields) -> Listed:
    return Listed(key=mirror.identity().key, url="https://here.example.org", name="here", admitted=1.0, **fields)


@pytest.fixture
def log() -> OtherMirror:
    made = OtherMirror()
    for n in range(9):
        made.tell("weather.seen", n, {"rain": n})
    return made


@pytest.fixture
def small(log):
    made = SmallMirror(log)
    first = signed_list(1, ourselves(), made.listed)
    lists.take([first], vouched=first.digest)
    yield made
    made.close()


@pytest.fixture
def hurry(monkeypatch):
    monkeypatch.setattr(peer, "BETWEEN", 1.5)
    monkeypatch.setattr(peer, "WHOLE", 2.0)
    monkeypatch.setattr(peer, "MAX_ANSWER", 1 << 20)


def pull(small: SmallMirror) -> pulling.Pulled:
    return pulling.pull(small.listed)


def here(log: OtherMirror) -> int:
    """How many of its events are here, all of them the true ones."""
    found = list(LogEvent.objects.filter(origin=log.origin).order_by("seq").values_list("digest", flat=True))
    assert found == [digest(each.body) for each in log.events[: len(found)]]
    return len(found)


# ---- what is well


def test_another_mirrors_log_comes_here_page_by_page_and_once(small, log):
    small.most = 3
    assert pull(small).stored == 10 and here(log) == 10
    before = len(small.asked)
    assert pull(small) == pulling.Pulled() and small.asked[before:] == ["GET /mirrors/heads"]
    log.tell("weather.seen", 1, {"rain": 0})
    assert pull(small).stored == 1
    standing = Standing.objects.get(pk=small.identity.key)
    assert standing.why == "" and standing.heard is not None


def test_its_clock_is_noted_by_what_it_signed(small):
    small.ahead = 3600.0
    pull(small)
    assert Clock.objects.get(pk=small.identity.key).ahead == pytest.approx(3600, abs=5)


def test_a_mirror_that_speaks_the_protocol_before_or_after_too_is_understood_and_others_are_not(small, log):
    small.protocols = [2, 1]
    assert pull(small).stored == 10
    small.protocols = [3, 2]
    assert "speaks the protocols [3, 2] between mirrors, and this site 1" in pull(small).refused[0]


def test_a_proof_that_another_mirror_keeps_is_believed_here_and_its_log_ends_there(small, log):
    pull(small)
    second = log.sign("weather.seen", 4, {"rain": 99}, seq=5, prev=digest(log.events[3].body))
    small.proofs = [Pair(first=log.events[4], second=second)]
    pull(small)
    assert Proof.objects.get().seq == 5 and LogEvent.objects.filter(origin=log.origin, accepted=True).count() == 4


def test_a_mirror_that_shows_another_event_of_a_number_than_before_has_proved_its_fork(small, log):
    pull(small)
    log.events[9] = log.sign("weather.seen", 8, {"rain": 99}, seq=10, prev=digest(log.events[8].body))
    pull(small)
    assert Proof.objects.get().seq == 10
    assert LogEvent.objects.filter(origin=log.origin, accepted=True).count() == 9


def test_a_nudge_goes_to_the_others_once_for_many_changes(small, valkey, settings):
    tasks.nudge()
    assert small.asked == ["POST /mirrors/nudge"]
    sent = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks.nudge, "apply_async", lambda **options: sent.append(options))
        for _ in range(5):
            tasks.changed()
    assert len(sent) == 1


def test_the_status_says_of_each_other_mirror_whether_it_has_come_to_our_state(small, log):
    (told,) = Client().get("/status").json()["mirrors"]
    assert (told["same"], told["heard"], told["why"]) == (None, None, "")
    pull(small)
    (told,) = Client().get("/status").json()["mirrors"]
    assert told["same"] is (state_hash() == "0" * 64) and told["heard"] > 0 and told["url"] == small.url


# ---- what is not


def test_a_log_with_a_hole_is_refused_and_comes_whole_the_next_time(small, log):
    whole = small.routes[f"GET /mirrors/logs/{log.origin}"]
    small.routes[f"GET /mirrors/logs/{log.origin}"] = lambda query, who: LogPart(
        events=[*log.events[:4], *log.events[5:]]
    )
    assert "has a hole: event 6 came, and 4 is the last" in pull(small).refused[0]
    assert here(log) == 0, "not even what came before the hole"
    small.routes[f"GET /mirrors/logs/{log.origin}"] = whole
    assert pull(small).stored == 10 and here(log) == 10


def test_what_came_before_a_broken_page_stays_and_the_next_pull_goes_on_from_there(small, log):
    small.most, whole = 4, small.page

    def breaks(query, who):
        return (
            whole(query, who) if int(query["after"]) < 4 else (200, whole(query, who).model_dump_json().encode()[:-40])
        )

    small.routes[f"GET /mirrors/logs/{log.origin}"] = breaks
    assert "it may be cut off" in pull(small).refused[0] and here(log) == 4
    small.routes[f"GET /mirrors/logs/{log.origin}"] = whole
    assert pull(small).stored == 6


@pytest.mark.parametrize("what", ["altered", "a stranger's", "cut short", "nothing"])
def test_a_page_that_is_not_the_log_is_refused_whole(small, log, what):
    forged = wire.Signed(key=log.identity.key, body=log.events[3].body.replace("2", "3"), signature="0" * 128)
    stranger = OtherMirror(seed=3)
    events = {
        "altered": [*log.events[:3], forged],
        "a stranger's": stranger.events,
        "cut short": log.events[:3],
        "nothing": [],
    }[what]
    small.routes[f"GET /mirrors/logs/{log.origin}"] = lambda query, who: LogPart(events=events[int(query["after"]) :])
    told = pull(small)
    assert here(log) == (3 if what == "cut short" else 0)
    sentence = {
        "altered": "its signature does not match",
        "a stranger's": "which is no mirror of the list",
        "cut short": "",
        "nothing": "has 10 events of log",
    }[what]
    assert sentence in "".join(told.refused) and not Origin.objects.filter(pk=stranger.origin).exists()


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
        (lambda: (200, b"<html><title>Welcome</title></html>"), "something that no mirror says"),
        (lambda: (200, b'{"key": "ab'), "it may be cut off"),
        (lambda: (200, b""), "something that no mirror says"),
        (lambda: (502, b"<html>Bad gateway</html>"), "answered 502 with something that no mirror says"),
        (lambda: (503, b'{"error": "the database is away"}'), "refuses: the database is away"),
    ],
)
@pytest.mark.parametrize("where", ["GET /mirrors/heads", "the log"])
def test_a_mirror_that_answers_with_something_else_is_named_and_changes_nothing(
    small, log, hurry, monkeypatch, where, answer, sentence
):
    where = f"GET /mirrors/logs/{log.origin}" if where == "the log" else where
    right = small.routes[where]
    small.routes[where] = lambda query, who: answer()
    told = pull(small)
    assert sentence in told.refused[0] and told.refused[0].startswith("the small one")
    assert here(log) == 0 and Standing.objects.get().why == told.refused[0][:300]
    small.routes[where] = right
    monkeypatch.undo()
    assert pull(small).stored == 10 and Standing.objects.get().why == ""


def test_a_mirror_that_is_gone_is_named(small, log):
    small.close()
    assert "does not answer" in pull(small).refused[0]


def test_a_mirror_that_does_not_answer_is_left_alone_for_longer_each_time_and_heard_again_when_it_nudges(small, log):
    key, right = small.identity.key, small.routes["GET /mirrors/heads"]
    small.routes["GET /mirrors/heads"] = lambda query, who: (502, b"<html>")
    assert pulling.pull_all()[key].refused
    assert pulling.pull_all() == {}, "not at once again: other tasks wait behind it"
    standing = Standing.objects.get()
    waits = [pulling.wait(Standing(key=key, failures=n)).total_seconds() for n in (1, 4, 100)]
    assert standing.failures == 1 and 2.5 <= waits[0] <= 5 and 20 <= waits[1] <= 40 and 60 <= waits[2] <= 120
    small.routes["GET /mirrors/heads"] = right
    tasks.pull(key)
    assert here(log) == 10 and Standing.objects.get().failures == 0
    assert pulling.pull_all() == {key: pulling.Pulled()}


def test_who_was_silent_is_knocked_at_and_heard_as_soon_as_it_is_there_again(small, log, hurry, monkeypatch):
    monkeypatch.setattr(peer, "KNOCK", 0.5)
    monkeypatch.setattr(pulling, "SOONEST", pulling.LONGEST)
    right = dict(small.routes)
    small.routes |= dict.fromkeys(("GET /mirror", "GET /mirrors/heads"), lambda query, who: (200, silent()))
    assert "does not answer" in pulling.pull_all()[small.identity.key].refused[0]
    assert pulling.pull_all() == {}, "it does not open"
    asked = len(small.asked)
    tasks.nudge()
    assert "POST /mirrors/nudge" not in small.asked[asked:], "nobody waits for it"
    small.routes = right
    assert pulling.pull_all()[small.identity.key].stored == 10
    tasks.nudge()
    assert small.asked[-1] == "POST /mirrors/nudge"


def test_a_mirror_whose_database_was_away_is_heard_as_soon_as_it_is_back(small, log, monkeypatch):
    monkeypatch.setattr(pulling, "SOONEST", pulling.LONGEST)
    key, right = small.identity.key, small.routes["GET /mirrors/heads"]
    small.routes["GET /mirrors/heads"] = lambda query, who: (503, b'{"error": "the database is away"}')
    assert "the database is away" in pulling.pull_all()[key].refused[0]
    small.routes["GET /mirrors/heads"] = right
    assert pulling.pull_all()[key].stored == 10


def test_while_valkey_is_away_the_list_is_known_and_a_change_goes_through(small, monkeypatch, settings):
    away = {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": "redis://127.0.0.1:1/0"}
    settings.CACHES = {"default": away}
    tasks.changed()
    assert lists.named()[0] == 1
    assert lists.take([signed_list(2, ourselves(), small.listed)])


def test_heads_by_another_key_or_for_another_site_are_refused(small):
    small.routes["GET /mirrors/heads"] = lambda query, who: STRANGER.sign("heads", small.heads(who))
    assert "is signed by" in pull(small).refused[0]
    small.routes["GET /mirrors/heads"] = lambda query, who: small.identity.sign("heads", small.heads(STRANGER.key))
    assert "not for this site" in pull(small).refused[0]


def certificate(folder, host: str) -> ssl.SSLContext:
    """By nobody that anybody trusts."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(1)
        .not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1)).sign(key, hashes.SHA256())
    )  # fmt: skip
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "tls.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM) + private)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.pem")
    return context


def test_a_mirror_with_a_wrong_certificate_is_refused_by_that(log, tmp_path):
    small = SmallMirror(log, certificate(tmp_path, "elsewhere.example.org"))
    first = signed_list(1, ourselves(), small.listed)
    lists.take([first], vouched=first.digest)
    assert "certificate verify failed" in pull(small).refused[0] and here(log) == 0
    small.close()


# ---- the list


def test_a_newer_list_comes_with_a_pull_and_withdraws_what_an_expelled_mirror_said_last(small, log):
    pull(small)
    gone = small.listed.model_copy(update={"expelled": Expulsion(at=1.0, last={log.origin: 6}, reason="it lied")})
    small.lists = [signed_list(2, ourselves(), gone)]
    pull(small)
    assert lists.newest().version == 2 and lists.others() == []
    assert LogEvent.objects.filter(origin=log.origin, accepted=True).count() == 6
    assert "it lied" in Origin.objects.get(pk=log.origin).why


def test_a_log_that_an_expulsion_does_not_name_counts_for_nothing(small, log):
    pull(small)
    lists.take([signed_list(2, ourselves(), small.listed.model_copy(update={"expelled": Expulsion(at=1.0)}))])
    assert not LogEvent.objects.filter(origin=log.origin, accepted=True).exists()
    assert lists.believed(log.origin) == {mirror.identity().key}


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        (lambda small: signed_list(2, ourselves(), small.listed, expires=5.0), "expired"),
        (lambda small: signed_list(2, ourselves(), small.listed, signers=1), "signed by 1 of the roots of list 1"),
        (lambda small: signed_list(2, ourselves()), "says nothing of the mirror"),
        (lambda small: signed_list(1, small.listed, ourselves()), "two different mirror lists 1"),
    ],
)
def test_a_list_that_does_not_hold_is_refused_by_a_sentence_and_the_log_comes_all_the_same(small, log, told, sentence):
    wrong = told(small)
    small.lists = [wrong]
    small.routes["GET /mirrors/list"] = lambda query, who: Lists(lists=[wrong])
    small.routes["GET /mirrors/heads"] = lambda query, who: small.identity.sign("heads", small.heads(who, mirrors=7))
    found = pull(small)
    assert sentence in found.refused[0] and found.stored == 10
    assert [each.version for each in List.objects.all()] == [1]


def test_a_downgrade_is_refused(small):
    lists.take([signed_list(3, ourselves(), small.listed)])
    with pytest.raises(ListError, match="older than 3"):
        lists.take([signed_list(2, ourselves(), small.listed)])


# ---- what others ask of us


def asks(identity: Identity, method: str, path: str, message=None, **changed):
    path, body = "/api/v1" + path, b"" if message is None else message.model_dump_json().encode()
    token = changed.get("token") or identity.request_token(mirror.identity().key, method, path, body, time.time())
    return Client().generic(
        method, path, body, content_type="application/json", headers={"Authorization": f"Barnraise {token}"}
    )


def test_a_mirror_of_the_list_is_told_how_far_we_are_and_any_log_we_hold(small, log):
    pull(small)
    answer = asks(small.identity, "GET", "/mirrors/heads")
    heads = opened(wire.Signed.model_validate_json(answer.content), "heads", Heads, mirror.identity().key)
    assert heads.heads[log.origin].seq == 10 and heads.to == small.identity.key and heads.mirrors == 1
    answer = asks(small.identity, "GET", f"/mirrors/logs/{log.origin}?after=6&most=2")
    page = LogPart.model_validate_json(answer.content)
    assert page.events == log.events[6:8] and page.more
    page = LogPart.model_validate_json(asks(small.identity, "GET", f"/mirrors/logs/{log.origin}?after=8").content)
    assert page.events == log.events[8:] and not page.more


def test_a_page_is_bounded_in_bytes(small, log, monkeypatch):
    pull(small)
    monkeypatch.setattr("coordinator.api.mirrors.between.PAGE_BYTES", 1000)
    page = LogPart.model_validate_json(asks(small.identity, "GET", f"/mirrors/logs/{log.origin}").content)
    assert 1 <= len(page.events) < 10 and page.more


@pytest.mark.parametrize("query", ["after=-1", "after=x", "most=0", "most=100000", "after=99999999999999999999"])
def test_a_page_that_makes_no_sense_is_refused(small, log, query):
    assert asks(small.identity, "GET", f"/mirrors/logs/{log.origin}?{query}").status_code == 422


def test_who_is_not_of_the_list_was_expelled_or_says_a_thing_twice_is_refused(small):
    assert Client().get("/api/v1/mirrors/heads").status_code == 401
    assert "is no mirror of list 1" in asks(STRANGER, "GET", "/mirrors/heads").json()["error"]
    token = small.identity.request_token(mirror.identity().key, "GET", "/api/v1/mirrors/heads", b"", time.time())
    assert asks(small.identity, "GET", "/mirrors/heads", token=token).status_code == 200
    assert "made before" in asks(small.identity, "GET", "/mirrors/heads", token=token).json()["error"]
    assert asks(small.identity, "GET", "/mirrors/proofs", token=token).status_code == 401
    lists.take([signed_list(2, ourselves(), small.listed.model_copy(update={"expelled": Expulsion(at=1.0)}))])
    answer = asks(small.identity, "GET", "/mirrors/heads")
    assert answer.status_code == 403 and "was expelled" in answer.json()["error"]


def test_without_a_list_no_mirror_is_known():
    assert asks(STRANGER, "GET", "/mirrors/heads").status_code == 403


def test_anybody_gets_the_list_and_what_leads_to_it(small):
    second = signed_list(2, ourselves(), small.listed)
    lists.take([second])
    told = Lists.model_validate_json(Client().get("/api/v1/mirrors/list?after=1").content)
    assert told.lists == [second]
    assert Lists.model_validate_json(Client().get("/api/v1/mirrors/list?after=2").content).lists == []


def test_a_machine_hears_of_the_newest_list_with_every_directive(small, person, launched):
    _, machine = launched(person(organiser=True))
    reply = machine.join(_)
    directive = wire.Directive.model_validate_json(reply.directive.body)
    assert (directive.mirrors, directive.listed) == (1, List.objects.get().signed.digest)


def test_personal_data_goes_out_sealed_to_the_one_question(small):
    Particulars.objects.create(digest=digest("s" * 32 + "{}"), subject="person:x", salt="s" * 32, body="{}")
    lock, other = sealing.Lock(), sealing.Lock()
    wants = Wants(digests=[digest("s" * 32 + "{}")], key=lock.key)
    answer = asks(small.identity, "POST", "/mirrors/particulars", wants)
    sealed = Sealed.model_validate_json(answer.content)
    assert lock.open(sealed) == [particulars.Kept(wants.digests[0], "s" * 32, "{}")]
    with pytest.raises(Exception, match="cannot be opened"):
        other.open(sealed)
    assert (
        asks(small.identity, "POST", "/mirrors/particulars", Wants(digests=wants.digests, key="0" * 64)).status_code
        == 422
    )


def test_a_nudge_makes_a_pull(small, monkeypatch):
    pulled = []
    monkeypatch.setattr(tasks.pull, "delay", pulled.append)
    assert asks(small.identity, "POST", "/mirrors/nudge", wire.Bye(reason="")).status_code == 200
    assert pulled == [small.identity.key]


# ---- the commands


def run(*words: str) -> str:
    from io import StringIO

    out = StringIO()
    call_command(*words, stdout=out)
    return out.getvalue()


@pytest.fixture
def roots(tmp_path) -> list[str]:
    return [run("mirrors", "keygen", str(tmp_path / f"root{n}")).strip() for n in range(3)]


def begun(tmp_path, roots) -> str:
    file = str(tmp_path / "list.json")
    run(
        "mirrors", "begin", "--url", "https://here.example.org", "--name", "here", "--to", file, "--threshold", "2",
        *(word for root in roots for word in ("--root", root)),
    )  # fmt: skip
    return file


def test_a_list_is_begun_signed_and_published_and_a_mirror_added_and_expelled(tmp_path, roots):
    assert (tmp_path / "root0").stat().st_mode & 0o077 == 0, "readable by its owner alone"
    file = begun(tmp_path, roots)
    with pytest.raises(CommandError, match="signed by 0 of"):
        run("mirrors", "publish", file, "--first")
    run("mirrors", "sign", file, "--key", str(tmp_path / "root0"))
    assert "has signed" in run("mirrors", "sign", file, "--key", str(tmp_path / "root2"))
    assert "list 1 is in force" in run("mirrors", "publish", file, "--first")
    second = str(tmp_path / "second.json")
    run("mirrors", "add", "--key", STRANGER.key, "--url", "https://b.example.org", "--name", "b", "--to", second)
    run("mirrors", "expel", "--key", STRANGER.key[:8], "--last", f"{'a' * 32}:4", "--to", second)
    for name in ("root0", "root1"):
        run("mirrors", "sign", second, "--key", str(tmp_path / name))
    run("mirrors", "publish", second)
    found = lists.newest()
    assert found.version == 2 and found.named(STRANGER.key).expelled.last == {"a" * 32: 4}
    assert "(expelled" in run("mirrors", "show")
    with pytest.raises(CommandError, match="held already"):
        run("mirrors", "publish", second)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("keygen", "{root}"), "never written over"),
        (("sign", "{file}", "--key", "{none}"), "no key at"),
        (("sign", "{none}", "--key", "{root}"), "No such file"),
        (("sign", "{root}", "--key", "{root}"), "is not a mirror list"),
        (("sign", "{file}", "--key", "{file}"), "is not a key"),
        (("show",), "begin one"),
        (("add", "--key", "k", "--url", "https://b", "--name", "b", "--to", "{file}"), "key"),
        (("add", "--key", "{stranger}", "--url", "ftp://b", "--name", "b", "--to", "{file}"), "url"),
        (("expel", "--key", "{stranger}", "--to", "{file}"), "is not one mirror"),
    ],
)
def test_a_command_that_cannot_be_is_refused_by_a_sentence(tmp_path, roots, words, sentence):
    file = begun(tmp_path, roots)
    names = {"file": file, "root": str(tmp_path / "root0"), "none": str(tmp_path / "none"), "stranger": STRANGER.key}
    with pytest.raises(CommandError, match=sentence):
        run("mirrors", *(word.format(**names) for word in words))


def test_a_new_mirror_begins_from_any_one_other(log):
    small = SmallMirror(log)
    first = signed_list(1, ourselves(), small.listed)
    small.lists = [first]
    with pytest.raises(CommandError, match="Nothing was taken"):
        run("mirror", "join", small.url, "--list", "0" * 64)
    assert not List.objects.exists() and not LogEvent.objects.exists()
    assert "10 events in 1 logs" in run("mirror", "join", small.url, "--list", first.digest)
    assert here(log) == 10 and lists.newest().version == 1
    assert "state " in run("mirror", "pull")
    small.close()


def test_who_is_not_of_the_list_cannot_begin_from_it_and_hears_how_to_be(log):
    small = SmallMirror(log)
    small.lists = [signed_list(1, small.listed)]
    with pytest.raises(CommandError, match=f"--key {mirror.identity().key}"):
        run("mirror", "join", small.url, "--list", small.lists[0].digest)
    small.lists = []
    List.objects.all().delete()
    with pytest.raises(CommandError, match="has no mirror list"):
        run("mirror", "join", small.url)
    small.close()
