"""Every mirror shows the whole run: what machines report to others comes here, is kept apart, and is shown alike."""

import json
import time
from datetime import timedelta

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from mirror_lists import signed_list
from other_mirror import OtherMirror
from small_mirror import SmallMirror

from barnraise import wire
from barnraise.identity import Identity, digest
from barnraise.mirrors import Expulsion, Listed
from coordinator import mirror
from coordinator.fleet.facts import facts
from coordinator.fleet.models import Membership
from coordinator.live.picture import Picture
from coordinator.mirrors import lists
from coordinator.mirrors.models import LogEvent, Standing
from coordinator.telemetry import board, hearsay, history, listening, news, stream
from coordinator.telemetry.models import Ear, Event, Point, Rollup
from coordinator.telemetry.rollup import drain
from coordinator.telemetry.wire import Bulletin, Coming, Frame, Measured, News, Places, Sum, Wanted, Word

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("valkey")]
OTHER = "b" * 64
TRADE = wire.TradeView(
    round_steps=10, form="dense4", density=1.0, bits=4.0, sent_rate=1e3, received_rate=1e3, uplink_rate=0.0, lag=0
)


def report(volunteer, run, *reports) -> None:
    answer = volunteer.report(run, *reports)
    assert answer.status_code == 200, answer.content
    drain(wait=True)


def frame(**said) -> Frame:
    """Of the page's first machine."""
    plausible = {
        "of": 0, "age": 1.0, "latest": 9, "mark": 9, "activity": "training", "version": "0.1",
        "incarnation": "a" * 16, "step": 90, "tokens": 9000, "ledger_tokens": 9000, "rate": 700.0, "updates_sent": 9,
        "updates_received": 0, "peers": 0, "vector": "c" * 64, "anchor": None, "safe": False, "step_seconds": None,
        "trade": None,
    }  # fmt: skip
    return Frame(**{**plausible, **said})


def page(*machines, **rows) -> News:
    """What a mirror may tell; `machines`: (run, key) each."""
    empty = {"frames": [], "sums": [], "points": [], "comings": [], "places": Places(), "more": False}
    return News(machines=list(machines), **{**empty, **rows})


def told(found: News, key: str = OTHER, after: Places | None = None) -> hearsay.Taken:
    """Taken, as from a mirror that was asked past `after`, or past where it was heard last."""
    ear, _ = Ear.objects.get_or_create(key=key)
    return hearsay.take(key, after or ear.places, found)


def elsewhere(run, volunteer) -> tuple[str, str]:
    return str(run.pk), volunteer.machine.key


@pytest.fixture
def busy(person, launched, volunteer, numbers, plan):
    """(run, two volunteers), each of whom told a few reports."""
    run, ada = launched(person())
    bob = volunteer(person("bob@example.org", name="Bob"), seed=2)
    bob.join(run)
    same = {"vector": digest("vector"), "anchor": digest("weights")}
    for seq in (1, 2, 3):
        point = wire.Point(kind="validation", tokens=seq * 1000, loss=4.0)
        report(ada, run, numbers(seq, plan=plan, step_seconds=5.0, trade=TRADE, points=[point], **same))
        report(bob, run, numbers(seq, rate=300.0, ledger_tokens=seq * 1000, **same))
    return run, ada, bob


# ---- what is told, and shown


def test_a_mirror_to_which_nobody_reports_shows_the_run_as_the_one_they_report_to(busy, valkey):
    run, *_ = busy
    seen, past, each = Picture.take(run), history.history(run), history.lines(run)
    everything = News.model_validate_json(news.page(Wanted(nonce="0" * 32), OTHER).text)
    Membership.objects.all().delete()
    Event.objects.all().delete()
    valkey.flushdb()
    assert Picture.take(run).workers == {} and history.history(run)["rate"] == []
    logged = LogEvent.objects.count()
    assert told(everything).rows > 0 and LogEvent.objects.count() == logged, "none of it is an event of the log"
    valkey.flushdb()  # what happened is gathered anew every two seconds
    again = Picture.take(run)
    seen_by = [picture.workers | {"now": 0} for picture in (seen, again)]
    for picture in seen_by:
        for row in picture.values():
            if isinstance(row, dict):
                row["last_seen"] = round(row["last_seen"] / 5)
    assert seen_by[0] == seen_by[1] and seen.plans == again.plans
    unlike = {"waiting"}
    assert {k: v for k, v in seen.run.items() if k not in unlike} == {
        k: v for k, v in again.run.items() if k not in unlike
    }
    assert again.run["agree"] is True and again.run["workers_alive"] == 2 and again.run["rate"] == 800.0
    assert history.history(run) == past and history.lines(run) == each
    assert [e["what"] for e in again.events.values() if e["what"] == "joined"] == ["joined", "joined"]


def test_only_what_changed_is_told_and_a_plan_once(busy, numbers, plan):
    run, ada, _ = busy
    first = news.news(Places())
    assert len(first.frames) == 2 and first.frames[0].plan == plan and not first.more
    nothing = news.news(first.places)
    assert (nothing.machines, nothing.frames, nothing.sums, nothing.points, nothing.comings) == ([], [], [], [], [])
    assert nothing.places == first.places
    report(ada, run, numbers(4, plan=plan))
    second = news.news(first.places)
    assert second.machines == [elsewhere(run, ada)] and [f.plan for f in second.frames] == [None]
    assert {each.width for each in second.sums} == {10, 60, 3600} and [p.seq for p in second.points] == [4]
    changed = plan.model_copy(update={"predicted_seconds": 4.0})
    report(ada, run, numbers(5, plan=changed))
    assert news.news(second.places).frames[0].plan == changed
    assert sum(frame.plan is not None for frame in news.news(Places()).frames) == 1, "who is new hears of it"


def test_what_does_not_fit_one_page_comes_with_the_next_and_nothing_twice(busy, monkeypatch):
    for name, most in (("FRAMES", 1), ("SUMS", 2), ("POINTS", 4), ("COMINGS", 1)):
        monkeypatch.setattr(news, name, most)
    after, points, sums, pages = Places(), [], [], 0
    while True:
        found = news.news(after)
        points += [(found.machines[p.of], p.seq, p.position) for p in found.points]
        sums += [(found.machines[s.of], s.width, s.bucket) for s in found.sums]
        pages, after = pages + 1, found.places
        if not found.more:
            break
    assert pages > 2 and len(points) == len(set(points)) == Point.objects.count()
    assert len(sums) == len(set(sums)) == Rollup.objects.count()


def test_what_another_mirror_told_is_not_passed_on(busy):
    run, ada, _ = busy
    before = news.news(Places())
    now = int(time.time())
    rows = {
        "sums": [Sum(0, 10, now // 10 * 10, 1, 1.0, 1, 1, 1, 1, 1)],
        "points": [Measured(0, 77, 0, "train", 5, 1.0, now)],
        "comings": [Coming(0, "0192f0c1-4d3e-7f40-8a5b-6c7d8e9f0a1c", "left", now)],
    }
    assert told(page(elsewhere(run, ada), frames=[frame()], **rows)).rows == 4
    after = news.news(Places())
    assert after == before.model_copy(update={"frames": after.frames}) and len(after.frames) == 2


def test_the_same_told_twice_changes_nothing(busy):
    run, ada, _ = busy
    now = int(time.time())
    said = page(
        elsewhere(run, ada), elsewhere(run, ada), frames=[frame(), frame(of=1)],
        sums=[Sum(of, 10, now // 10 * 10, 2, 1000.0, 1, 1, 1, 1, 1) for of in (0, 1)],
        points=[Measured(0, 77, 0, "train", 5000, 1.0, now)] * 2,
    )  # fmt: skip
    for _ in range(2):
        told(said)
        assert Membership.everywhere.filter(mirror=OTHER).count() == 1
        assert Rollup.objects.filter(membership__mirror=OTHER).get().rate_sum == 1000.0
        assert Point.objects.filter(membership__mirror=OTHER).count() == 1


def test_another_process_that_was_here_first_is_not_overtaken(busy):
    run, ada, _ = busy
    told(page(elsewhere(run, ada), frames=[frame()], places=Places(frames=(5, None))))
    assert told(page(elsewhere(run, ada), frames=[frame(tokens=1)]), after=Places()) == hearsay.Taken()
    assert Membership.everywhere.get(mirror=OTHER).tokens == 9000


# ---- one machine, two mirrors


def test_a_machine_that_moves_is_one_machine_and_its_newest_report_counts(busy, numbers):
    run, ada, _ = busy
    told(page(elsewhere(run, ada), frames=[frame(age=30.0, tokens=2, rate=7.0)]))
    (mine,) = [row for row in board.workers(run) if row["id"] == str(ada.machine.pk)]
    assert mine["tokens"] == 3000, "it reported here since"
    Membership.objects.filter(machine=ada.machine).update(heard=timezone.now() - timedelta(minutes=1))
    stream.client().delete(stream.workers_key(run.pk))
    told(page(elsewhere(run, ada), frames=[frame(age=1.0)]))
    picture = Picture.take(run)
    assert (picture.run["workers_known"], picture.run["rate"]) == (2, 1000.0)
    assert picture.workers[str(ada.machine.pk)]["tokens"] == 9000
    assert len(facts_of(run)) == 2
    ada.join(run)  # where it is found is told to every mirror: that is no report
    assert Picture.take(run).workers[str(ada.machine.pk)]["activity"] == "training"
    report(ada, run, numbers(10, rate=500.0))
    assert Picture.take(run).run["rate"] == 800.0


def facts_of(run) -> list:
    found = list(Membership.everywhere.newest().filter(run=run))
    assert facts(run).alive == len(found)
    return found


def test_the_rate_of_a_machine_that_told_two_mirrors_in_one_bucket_is_a_mean_and_not_a_sum(busy):
    run, ada, _ = busy
    before = history.history(run)["rate"]
    ours = Rollup.objects.filter(membership__machine=ada.machine)
    same = [
        Sum(0, r.width, r.bucket, r.reports, r.rate_sum, r.tokens, r.updates_sent, 0, r.peer_bytes_sent, 0)
        for r in ours
    ]
    points = [
        Measured(0, p.seq, p.position, p.kind, p.tokens, p.loss, p.at)
        for p in Point.objects.filter(membership__machine=ada.machine)
    ]
    curves = history.history(run)
    told(page(elsewhere(run, ada), frames=[frame()], sums=same, points=points))
    assert history.history(run)["rate"] == before
    assert history.history(run)["validation"] == curves["validation"], "no point is there twice"
    assert len(history.lines(run)) == 1


def test_the_gap_below_what_a_machine_tells_here_is_closed_by_what_it_told_elsewhere(busy, numbers):
    run, ada, _ = busy
    told(page(elsewhere(run, ada), frames=[frame(latest=8, mark=8)]))
    report(ada, run, numbers(9), numbers(10))
    assert Membership.objects.get(machine=ada.machine).mark == 10
    report(ada, run, numbers(15))
    assert Membership.objects.get(machine=ada.machine).mark == 10, "nobody has 11 to 14"
    told(page(elsewhere(run, ada), frames=[frame(latest=1 << 40, mark=1 << 40)]))
    report(ada, run, numbers(16))
    assert Membership.objects.get(machine=ada.machine).mark == 16
    report(ada, run, numbers(17))
    assert Membership.objects.get(machine=ada.machine).mark == 17, "a mirror's word never reaches past a machine's own"


def test_a_machine_that_came_over_from_another_mirror_did_not_join_again(busy, volunteer, person, numbers):
    run, *_ = busy
    carl = volunteer(person("carl@example.org"), seed=3)
    carl.join(run)
    told(page(elsewhere(run, carl), frames=[frame()]))
    report(carl, run, numbers(10))
    assert not Event.objects.filter(machine=carl.machine).exists()


def test_what_a_run_waits_for_is_reckoned_with_all_its_machines(person, draft, manifest, volunteer):
    owner = person()
    run = draft(owner, quorum=2)
    ada, bob = volunteer(owner), volunteer(person("bob@example.org"), seed=2)
    ada.join(run)
    assert facts(run).alive == 1
    told(page(elsewhere(run, bob), frames=[frame(ledger_tokens=70_000, safe=True)]))
    known = facts(run)
    assert (known.alive, known.ledger_tokens, known.others_safe, known.others_ever) == (2, 70_000, 1, 1)
    Membership.everywhere.update(last_seen=timezone.now() - timedelta(minutes=5))
    assert facts(run).alive == 0, "what a dead mirror told grows old as anything does"


# ---- what is not taken, or not for long


def test_a_machine_that_no_event_has_told_of_yet_is_waited_for_and_not_for_ever(busy):
    run, ada, _ = busy
    late = Identity(b"z" * 32)
    said = page(
        (str(run.pk), late.key), elsewhere(run, ada), frames=[frame(), frame(of=1)], more=True,
        places=Places(frames=(7, None)),
    )  # fmt: skip
    taken = told(said)
    assert (taken.left_out, taken.more) == ("", False) and Ear.objects.get(key=OTHER).places == Places()
    assert Membership.everywhere.filter(mirror=OTHER).count() == 1, "the others do not wait"
    Ear.objects.update(waits=timezone.now() - hearsay.PATIENCE)
    taken = told(said)
    assert late.key[:8] in taken.left_out and taken.more
    assert Ear.objects.get(key=OTHER).places.frames.moment == 7


def test_times_that_cannot_be_are_not_drawn(busy):
    run, ada, _ = busy
    past, now = history.history(run)["rate"], int(time.time())
    hours = (now // 3600 + 24 * 365, 0)
    taken = told(page(
        elsewhere(run, ada), sums=[Sum(0, 3600, hour * 3600, 1, 1e6, 0, 0, 0, 0, 0) for hour in hours],
        points=[Measured(0, 1, 0, "train", 10**12, 1.0, now), Measured(0, 2, 0, "train", 10, 1.0, now + 1e6)],
    ))  # fmt: skip
    assert "2 sums of times that are not the run's" in taken.left_out
    assert history.history(run)["rate"] == past
    point = Point.objects.get(membership__mirror=OTHER)
    assert point.seq == 2 and point.at <= time.time(), "no count past the budget, and no time to come"


@pytest.fixture
def small():
    made = SmallMirror(OtherMirror())
    ours = Listed(key=mirror.identity().key, url="https://here.example.org", name="here", admitted=1.0)
    first = signed_list(1, ours, made.listed)
    lists.take([first], vouched=first.digest)
    yield made
    made.close()


def answering(small: SmallMirror, found: News, **changed):
    """Serves this page; `changed`: other words than the true ones."""

    def answer(query, who) -> Bulletin:
        asked, text = Wanted.model_validate_json(query["body"]), changed.get("text", found.model_dump_json())
        word = {"mirror": small.identity.key, "to": who, "nonce": asked.nonce, "digest": digest(text), **changed}
        signer = changed.get("signer", small.identity)
        return Bulletin(word=signer.sign("news", Word(**word)), text=text)

    small.routes["POST /mirrors/news"] = answer


def test_other_mirrors_are_asked_for_what_is_past_what_came(small, busy, django_capture_on_commit_callbacks):
    run, ada, _ = busy
    now = time.time()
    places = Places(frames=(7, None))
    answering(small, page(
        elsewhere(run, ada), frames=[frame()], points=[Measured(0, 77, 0, "train", 5000, 1.0, now)], places=places,
    ))  # fmt: skip
    cursor = stream.cursor(run.pk)
    with django_capture_on_commit_callbacks(execute=True):
        assert listening.gather() == 2
    assert Ear.objects.get().places == places and Ear.objects.get().why == ""
    (shown,), _ = stream.points_since(run.pk, cursor)
    assert shown == {"machine": str(ada.machine.pk), "kind": "train", "tokens": 5000, "loss": 1.0, "at": shown["at"]}
    assert Membership.everywhere.get(mirror=small.identity.key).tokens == 9000


def html(query, who):
    return 200, b"<!doctype html><title>It works!</title>"


@pytest.mark.parametrize(
    "what, sentence",
    [
        ({"nonce": "f" * 32}, "news that is not for this request"),
        ({"to": OTHER}, "news that is not for this request"),
        ({"digest": "0" * 64}, "news that is not for this request"),
        ({"signer": Identity(b"y" * 32)}, "is signed by"),
        ({"text": '{"machines": 7}'}, "its news is malformed: machines"),
        ({"text": page().model_dump_json().replace('"comings":[]', '"comings":[[0,"x","left",1]]')}, "comings"),
        (html, "something that no mirror says"),
    ],
)  # fmt: skip
def test_what_is_not_another_mirrors_word_for_us_is_refused_with_a_sentence(small, busy, what, sentence):
    run, ada, _ = busy
    if callable(what):
        small.routes["POST /mirrors/news"] = what
    else:
        answering(small, page(elsewhere(run, ada), frames=[frame()]), **what)
    assert listening.gather() == 0 and sentence in Ear.objects.get().why
    assert not Membership.everywhere.filter(mirror=small.identity.key).exists()
    asked = len(small.asked)
    assert listening.gather() == 0 and len(small.asked) == asked, "it is left alone for a moment"
    answering(small, page(elsewhere(run, ada), frames=[frame()]))
    Ear.objects.update(tried=timezone.now() - timedelta(minutes=5))
    assert listening.gather() == 1 and Ear.objects.get().why == ""


def test_a_mirror_that_does_not_answer_for_its_log_is_not_asked(small):
    Standing.objects.create(key=small.identity.key, failures=1)
    assert listening.gather() == 0 and small.asked == []


def test_an_expelled_mirrors_rows_go(small, busy):
    run, ada, _ = busy
    at = Coming(0, "0192f0c1-4d3e-7f40-8a5b-6c7d8e9f0a1c", "left", time.time())
    answering(small, page(elsewhere(run, ada), frames=[frame()], comings=[at]))
    listening.gather()
    assert Event.objects.filter(mirror=small.identity.key).exists()
    gone = small.listed.model_copy(update={"expelled": Expulsion(at=2.0, last={})})
    ours = Listed(key=mirror.identity().key, url="https://here.example.org", name="here", admitted=1.0)
    lists.take([signed_list(2, ours, gone)])
    listening.gather()
    assert not Membership.everywhere.exclude(mirror="").exists() and not Ear.objects.exists()
    assert not Event.objects.filter(mirror=small.identity.key).exists() and Event.objects.exists()


def test_news_is_for_mirrors_of_the_list_alone(small, busy):
    path, body = "/api/v1/mirrors/news", Wanted(nonce="0" * 32).model_dump_json().encode()

    def asked(identity: Identity):
        token = identity.request_token(mirror.identity().key, "POST", path, body, time.time())
        return Client().post(path, body, "application/json", headers={"Authorization": f"Barnraise {token}"})

    assert asked(Identity(b"x" * 32)).status_code == 401 and Client().post(path).status_code == 401
    answer = asked(small.identity)
    assert answer.status_code == 200, answer.content
    found = Bulletin.model_validate_json(answer.content)
    said = json.loads(found.word.body)
    assert said["to"] == small.identity.key and said["digest"] == digest(found.text)
    assert len(News.model_validate_json(found.text).frames) == 2


def test_telling_and_taking_ask_as_many_questions_for_thirty_machines_as_for_one(busy, volunteer, numbers):
    run, ada, _ = busy
    others = [volunteer(run.owner, seed) for seed in range(10, 40)]
    counts, after = [], news.news(Places()).places
    for each in others:
        each.join(run)
    for reporting, seq in (([ada], 4), ([ada, *others], 5)):
        for each in reporting:
            assert each.report(run, numbers(seq)).status_code == 200
        drain(wait=True)
        with CaptureQueriesContext(connection) as telling:
            found = news.news(after)
        with CaptureQueriesContext(connection) as taking:
            told(found)
        assert len(found.frames) == len(reporting) and len(telling) == 4
        size = len(found.model_dump_json()) / len(reporting)
        assert size < 2000, f"{size:.0f} bytes a report"
        counts.append(len(taking))
        after = found.places
    assert counts[1] <= counts[0] + 1, counts
