"""Credit that several mirrors hear of: once, to the token, at every moment, and without answering each other."""

import secrets
from datetime import UTC, datetime, timedelta

import hypothesis.strategies as st
import pytest
from django.db.models import F
from django.utils import timezone
from helpers.attestations import witness_of
from helpers.event_log_builder import LogBuilder
from helpers.rebuild_site import all_events, all_private_data, rebuild_in_one_batch, replicated_rows
from hypothesis import HealthCheck, example, given, settings

from coordinator.credit import attestations, tasks
from coordinator.credit.models import Credit
from coordinator.credit.replicated.credits import UnpublishedRange, remaining
from coordinator.eventlog import ingest, projection
from coordinator.eventlog.models import LogEvent
from coordinator.eventlog.truncate import truncate_log

DAY = datetime(2026, 1, 1, 12, tzinfo=UTC)


def up_to(seq: int) -> int:
    """Tokens of an author's first updates, which are of many sizes."""
    return sum(1 + 37 * each % 91 for each in range(1, seq + 1))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 20), st.integers(0, 60))
def test_of_what_was_heard_only_what_lies_beyond_what_was_told_is_left(sizes, told, reach):
    """Against a count update by update: `told` of them at first, then all to `reach`."""
    ends = [told + sum(sizes[: n + 1]) for n in range(len(sizes))]
    heard = [
        UnpublishedRange(first + 1, last, up_to(last) - up_to(first))
        for first, last in zip([told, *ends], ends, strict=False)
    ]
    found = remaining(heard, max(told, reach), up_to(max(told, reach)) - up_to(told))
    assert found == [
        sum(up_to(seq) - up_to(seq - 1) for seq in range(each.first, each.last + 1) if seq > reach)
        for each in heard
    ]


class Mirrors:
    """This site and one other, which hear of one author's updates, and of each other."""

    def __init__(self, run, author, witness, monkeypatch):
        self.run, self.author, self.witness = run, author, witness
        self.member = run.memberships.get(machine=witness.machine)
        self.other = LogBuilder()
        self.begin()
        monkeypatch.setattr(attestations.timezone, "now", lambda: self.day)

    def begin(self) -> None:
        """A new life of the author's."""
        self.life, self.day, self.most, self.told = secrets.token_hex(8), DAY, 0, 0

    def hears(self, seq: int) -> None:
        attestations.record_attestations(
            [
                (
                    self.member,
                    [witness_of(self.witness, self.run, self.author, seq, up_to(seq), self.life)],
                )
            ]
        )
        self.most = max(self.most, seq)

    def hears_elsewhere(self, first: int, last: int) -> None:
        """The other mirror heard of these, told it, and we pull."""
        said = {
            "day": self.day.date().isoformat(), "first": first, "last": last, "witness": self.witness.identity.key,
            "tokens": up_to(last) - up_to(first - 1), "total": up_to(last),
        }  # fmt: skip
        self.other.append(
            "credit.receipt", f"{self.run.pk}:{self.author.identity.key}:{self.life}", said
        )
        told = ingest.ingest_events(self.other.events[-2:])
        assert not told.rejected
        self.most, self.told = max(self.most, last), max(self.told, last)

    def tell(self) -> int:
        told = tasks.record_events()
        self.told = self.most
        return told

    def shown(self) -> int:
        return sum(Credit.objects.filter(incarnation=self.life).values_list("tokens", flat=True))


@pytest.fixture
def mirrors(person, launched_run, volunteer, monkeypatch):
    run, ada = launched_run(person(name="Ada"))
    bob = volunteer(person("bob@example.org"), 3)
    bob.join(run)
    run.memberships.update(tokens=1 << 40)
    return Mirrors(run, ada, bob, monkeypatch)


@pytest.mark.django_db
def test_what_another_mirror_tells_of_is_not_answered(mirrors):
    """Two mirrors that answered each receipt with what they had heard meanwhile would write events without end."""
    mirrors.hears(4)
    tasks.record_events()
    mirrors.hears(8)
    before = LogEvent.objects.filter(origin__ours=True).count()
    mirrors.hears_elsewhere(5, 6)
    assert mirrors.shown() == up_to(8), "what it heard beyond that still counts"
    mirrors.hears_elsewhere(7, 12)
    assert mirrors.shown() == up_to(12)
    assert LogEvent.objects.filter(origin__ours=True).count() == before
    assert tasks.record_events() == 0, "all of it was told by the other"
    mirrors.hears(13)
    assert tasks.record_events() == 1 and mirrors.shown() == up_to(13)


@pytest.mark.django_db
def test_too_high_credit_is_corrected_by_the_authors_totals(mirrors):
    """A report was counted while another mirror's receipt of the same updates was written."""
    mirrors.hears(4)
    tasks.record_events()
    mirrors.hears_elsewhere(5, 8)
    late = Credit.objects.get()
    head = witness_of(mirrors.witness, mirrors.run, mirrors.author, 9, up_to(9), mirrors.life)
    head = head.head.model_dump()
    Credit.objects.update(last=9, tokens=late.tokens + up_to(9) - up_to(4), author_header=head)
    assert tasks.record_events() == 1 and mirrors.shown() == up_to(9)


@pytest.mark.django_db
def test_what_a_mirror_that_lied_had_told_is_heard_again(mirrors):
    """Its receipts are withdrawn, and nobody else told the same: the author's next update brings all of it back."""
    mirrors.hears(4)
    mirrors.hears_elsewhere(1, 6)
    mirrors.hears(8)
    mirrors.tell()
    truncate_log(mirrors.other.origin, 1, "it lied")
    assert mirrors.shown() == up_to(8) - up_to(6)
    mirrors.hears(9)
    assert mirrors.tell() == 1 and mirrors.shown() == up_to(9)


@pytest.mark.django_db
def test_receipts_of_nothing_count_for_nothing_and_hold_up_nobody(mirrors):
    """Another mirror may say that a range ends before it begins: of one life, and of many in one go."""
    mirrors.hears(4)
    place, said = (
        f"{mirrors.run.pk}:{mirrors.author.identity.key}",
        {"day": "2026-01-01", "first": 9, "last": 3},
    )
    for life in (mirrors.life, "b" * 16, "c" * 16):
        mirrors.other.append(
            "credit.receipt", f"{place}:{life}", said | {"tokens": 7, "witness": None, "total": 7}
        )
    assert not ingest.ingest_events(mirrors.other.events).rejected
    assert (
        mirrors.shown() == up_to(4)
        and not Credit.objects.exclude(incarnation=mirrors.life).exists()
    )
    mirrors.hears_elsewhere(1, 6)
    assert mirrors.shown() == up_to(6) and mirrors.tell() == 0


HEARD = st.tuples(st.just("here"), st.integers(1, 30))
TOLD = st.tuples(st.just("there"), st.integers(1, 30), st.integers(0, 9))
DONE = st.lists(
    HEARD | TOLD | st.tuples(st.just("tell")) | st.tuples(st.just("midnight")), max_size=14
)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@pytest.mark.django_db
@example([("here", 2), ("midnight",), ("there", 1, 0), ("here", 3)])
@given(DONE)
def test_credit_is_exact_at_every_mirror_in_any_order_of_events(mirrors, done):
    mirrors.begin()
    for what, *which in done:
        match what:
            case "here":
                mirrors.hears(which[0])
            case "there":  # it tells on from what was told, perhaps before it heard that
                first = min(which[0], mirrors.told + 1)
                mirrors.hears_elsewhere(first, first + which[1])
            case "tell":
                mirrors.tell()
            case "midnight":
                mirrors.day += timedelta(days=1)
        assert mirrors.shown() == up_to(mirrors.most), done
    mirrors.tell()
    assert mirrors.shown() == up_to(mirrors.most) and mirrors.tell() == 0, done
    assert not Credit.objects.exclude(tokens=F("published_tokens")).exists()


@pytest.mark.django_db
def test_a_second_site_counts_the_same(mirrors):
    mirrors.hears(4)
    tasks.record_events()
    mirrors.hears(9)
    mirrors.hears_elsewhere(5, 6)
    mirrors.day += timedelta(days=1)
    mirrors.hears(11)
    mirrors.hears_elsewhere(7, 10)
    tasks.record_events()
    assert mirrors.shown() == up_to(11) and timezone.now() == mirrors.day
    both = replicated_rows(), projection.state_hash()
    assert rebuild_in_one_batch(all_events(), all_private_data()) == both
