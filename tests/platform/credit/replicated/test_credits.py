"""Test that credit attested at several mirrors is exact at each of them at every moment."""

import secrets
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from django.db.models import F
from django.utils import timezone
from helpers.effort import examples
from helpers.mirrors.event_histories import (
    DIGESTS,
    HISTORIES,
    assert_one_state,
    fold,
    fold_history,
    histories,
)
from helpers.mirrors.event_log_builder import LogBuilder
from helpers.mirrors.rebuild_site import (
    all_events,
    all_private_data,
    rebuild_in_one_batch,
    replicated_rows,
)
from helpers.updates.attestations import sign_attestation, sign_header, true_statement, witness_of
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from barnraise.protocol.enums import JoinPurpose
from barnraise.protocol.messages import CrewShare
from barnraise.protocol.signing import Identity
from coordinator.credit import attestations, tasks
from coordinator.credit.leaderboard import leaderboard, volunteer_record
from coordinator.credit.models import Credit
from coordinator.credit.replicated.credits import (
    UnpublishedRange,
    count_unpublished_tokens,
    store,
    store_batch,
)
from coordinator.eventlog import ingest, projection
from coordinator.eventlog.models import LogEvent
from coordinator.eventlog.registry import DependencyMissingError
from coordinator.eventlog.truncate import truncate_log
from coordinator.runs.models import Run

DAY = datetime(2026, 1, 1, 12, tzinfo=UTC)


def tokens_up_to(seq: int) -> int:
    """Return the tokens of an author's updates up to number `seq`, which differ in size."""
    return sum(1 + 37 * n % 91 for n in range(1, seq + 1))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 20), st.integers(0, 60))
def test_remaining_counts_only_updates_beyond_the_published_range(
    sizes, published, published_elsewhere
):
    """Compare with a count update by update.

    Args:
        sizes: Updates in each range that this site has not published.
        published: Updates that it had published before.
        published_elsewhere: The last update that another mirror published.
    """
    ends = [published + sum(sizes[: n + 1]) for n in range(len(sizes))]
    ranges = [
        UnpublishedRange(first + 1, last, tokens_up_to(last) - tokens_up_to(first))
        for first, last in zip([published, *ends], ends, strict=False)
    ]
    remaining_tokens = count_unpublished_tokens(
        ranges,
        max(published, published_elsewhere),
        tokens_up_to(max(published, published_elsewhere)) - tokens_up_to(published),
    )
    assert remaining_tokens == [
        sum(
            tokens_up_to(seq) - tokens_up_to(seq - 1)
            for seq in range(unpublished.first, unpublished.last + 1)
            if seq > published_elsewhere
        )
        for unpublished in ranges
    ]


class CreditAtTwoMirrors:
    """This site and another mirror, which both receive attestations of one author's updates."""

    def __init__(self, run, author, witness, monkeypatch):
        self.run = run
        self.author = author
        self.witness = witness
        self.member = run.memberships.get(machine=witness.machine)
        self.other = LogBuilder()
        self.start_incarnation()
        monkeypatch.setattr(attestations.timezone, "now", lambda: self.day)

    def start_incarnation(self) -> None:
        """Start a new incarnation of the author, with no updates."""
        self.incarnation = secrets.token_hex(8)
        self.day = DAY
        self.highest = 0  # the last update attested at any mirror
        self.published = 0  # the last update that a receipt covers

    def record_update(self, seq: int) -> None:
        """Record an attestation of update `seq` at this site."""
        total = tokens_up_to(seq)
        attestation = witness_of(self.witness, self.run, self.author, seq, total, self.incarnation)
        attestations.record_attestations([(self.member, [attestation])])
        self.highest = max(self.highest, seq)

    def ingest_receipt(self, first: int, last: int) -> None:
        """Ingest a receipt by the other mirror for updates `first` to `last`."""
        payload = {
            "day": self.day.date().isoformat(),
            "first": first,
            "last": last,
            "witness": self.witness.identity.key,
            "tokens": tokens_up_to(last) - tokens_up_to(first - 1),
            "total": tokens_up_to(last),
        }
        self.other.append(
            "credit.receipt",
            f"{self.run.pk}:{self.author.identity.key}:{self.incarnation}",
            payload,
        )
        result = ingest.ingest_events(self.other.events[-2:])
        assert not result.rejected
        self.highest = max(self.highest, last)
        self.published = max(self.published, last)

    def publish_receipts(self) -> int:
        """Record this site's credit as events; return how many."""
        count = tasks.record_events()
        self.published = self.highest
        return count

    def credited_tokens(self) -> int:
        """Return the tokens credited to the author's present incarnation."""
        return sum(
            Credit.objects.filter(incarnation=self.incarnation).values_list("tokens", flat=True)
        )


@pytest.fixture
def mirrors(person, launched_run, volunteer, monkeypatch):
    run, bob = launched_run(person("bob@example.org"), seed=3)
    ada = volunteer(person(name="Ada"), 1)
    ada.join(run)
    run.record_ledger_tokens(10**9)
    run.memberships.update(tokens=1 << 40)
    return CreditAtTwoMirrors(run, ada, bob, monkeypatch)


@pytest.mark.django_db
def test_receipt_of_another_mirror_causes_no_event_here(mirrors):
    """Two mirrors that answered each receipt with one of their own would never stop."""
    mirrors.record_update(4)
    tasks.record_events()
    mirrors.record_update(8)
    before = LogEvent.objects.filter(origin__ours=True).count()
    mirrors.ingest_receipt(5, 6)
    assert mirrors.credited_tokens() == tokens_up_to(8), (
        "updates beyond the receipt no longer count"
    )
    mirrors.ingest_receipt(7, 12)
    assert mirrors.credited_tokens() == tokens_up_to(12)
    assert LogEvent.objects.filter(origin__ours=True).count() == before
    assert tasks.record_events() == 0, "published what the other mirror had published"
    mirrors.record_update(13)
    assert tasks.record_events() == 1 and mirrors.credited_tokens() == tokens_up_to(13)


@pytest.mark.django_db
def test_too_high_credit_is_corrected_by_the_authors_totals(mirrors):
    """Count a report while another mirror's receipt of the same updates is written."""
    mirrors.record_update(4)
    tasks.record_events()
    mirrors.ingest_receipt(5, 8)
    credit = Credit.objects.get()
    attestation = witness_of(
        mirrors.witness, mirrors.run, mirrors.author, 9, tokens_up_to(9), mirrors.incarnation
    )
    attestation = attestation.head.model_dump()
    Credit.objects.update(
        last=9, tokens=credit.tokens + tokens_up_to(9) - tokens_up_to(4), author_header=attestation
    )
    assert tasks.record_events() == 1 and mirrors.credited_tokens() == tokens_up_to(9)


@pytest.mark.django_db
def test_credit_of_a_truncated_log_returns_with_the_next_update(mirrors):
    """Truncate the only log that has the receipts; the author's next update restores them."""
    mirrors.record_update(4)
    mirrors.ingest_receipt(1, 6)
    mirrors.record_update(8)
    mirrors.publish_receipts()
    truncate_log(mirrors.other.origin, 1, "it lied")
    assert mirrors.credited_tokens() == tokens_up_to(8) - tokens_up_to(6)
    mirrors.record_update(9)
    assert mirrors.publish_receipts() == 1 and mirrors.credited_tokens() == tokens_up_to(9)


@pytest.mark.django_db
def test_receipts_of_empty_ranges_count_nothing_and_block_nothing(mirrors):
    """Ingest receipts whose ranges end before they begin, of several incarnations at once."""
    mirrors.record_update(4)
    name_prefix = f"{mirrors.run.pk}:{mirrors.author.identity.key}"
    payload = {"day": "2026-01-01", "first": 9, "last": 3}
    for incarnation in (mirrors.incarnation, "b" * 16, "c" * 16):
        mirrors.other.append(
            "credit.receipt",
            f"{name_prefix}:{incarnation}",
            payload | {"tokens": 7, "witness": None, "total": 7},
        )
    assert not ingest.ingest_events(mirrors.other.events).rejected
    assert mirrors.credited_tokens() == tokens_up_to(4)
    assert not Credit.objects.exclude(incarnation=mirrors.incarnation).exists()
    mirrors.ingest_receipt(1, 6)
    assert mirrors.credited_tokens() == tokens_up_to(6) and mirrors.publish_receipts() == 0


UPDATE_REPORTED_HERE = st.tuples(st.just("here"), st.integers(1, 30))
RECEIPT_FROM_OTHER_MIRROR = st.tuples(st.just("there"), st.integers(1, 30), st.integers(0, 9))
ACTIONS = st.lists(
    UPDATE_REPORTED_HERE
    | RECEIPT_FROM_OTHER_MIRROR
    | st.tuples(st.just("publish"))
    | st.tuples(st.just("midnight")),
    max_size=14,
)


@settings(
    max_examples=examples(20, 60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@pytest.mark.django_db
@example([("here", 2), ("midnight",), ("there", 1, 0), ("here", 3)])
@given(ACTIONS)
def test_credit_is_exact_at_every_mirror_in_any_order_of_events(mirrors, actions):
    mirrors.start_incarnation()
    for action, *arguments in actions:
        match action:
            case "here":
                mirrors.record_update(arguments[0])
            case "there":  # the other mirror continues after the last published update
                first = min(arguments[0], mirrors.published + 1)
                mirrors.ingest_receipt(first, first + arguments[1])
            case "publish":
                mirrors.publish_receipts()
            case "midnight":
                mirrors.day += timedelta(days=1)
        assert mirrors.credited_tokens() == tokens_up_to(mirrors.highest), actions
    mirrors.publish_receipts()
    assert (
        mirrors.credited_tokens() == tokens_up_to(mirrors.highest)
        and mirrors.publish_receipts() == 0
    ), actions
    assert not Credit.objects.exclude(tokens=F("published_tokens")).exists()


@pytest.mark.django_db
def test_rebuilt_site_has_the_same_credit(mirrors):
    mirrors.record_update(4)
    tasks.record_events()
    mirrors.record_update(9)
    mirrors.ingest_receipt(5, 6)
    mirrors.day += timedelta(days=1)
    mirrors.record_update(11)
    mirrors.ingest_receipt(7, 10)
    tasks.record_events()
    assert mirrors.credited_tokens() == tokens_up_to(11) and timezone.now() == mirrors.day
    both = replicated_rows(), projection.state_hash()
    assert rebuild_in_one_batch(all_events(), all_private_data()) == both


receipt = st.builds(
    lambda day, first, more, rate, witness: {
        "day": f"2026-01-0{day}",
        "first": first,
        "last": first + more,
        "tokens": (more + 1) * rate,
        "witness": witness,
    },
    st.integers(1, 3),
    st.integers(1, 20),
    st.integers(0, 9),
    st.integers(0, 90),
    st.none() | DIGESTS,
)


@HISTORIES
@given(histories("credit", {"receipt": receipt}), st.integers())
def test_receipts_sum_to_the_union_of_their_ranges(facts, seed):
    assert_one_state("credit", facts, seed)
    days = fold("credit", facts)["days"].values()
    covered = {seq for item in facts for seq in range(item.payload.first, item.payload.last + 1)}
    highest_rate = max(
        item.payload.tokens / (item.payload.last - item.payload.first + 1) for item in facts
    )
    assert sum(day["tokens"] for day in days) <= highest_rate * len(covered)
    assert max(day["last"] for day in days) == max(covered)


@HISTORIES
@given(
    histories(
        "credit",
        {
            "receipt": receipt.map(
                lambda payload: payload | {"tokens": 7 * (payload["last"] - payload["first"] + 1)}
            )
        },
    )
)
def test_receipts_that_agree_count_each_token_once(facts):
    covered = {seq for item in facts for seq in range(item.payload.first, item.payload.last + 1)}
    assert sum(day["tokens"] for day in fold("credit", facts)["days"].values()) == 7 * len(covered)


@HISTORIES
@given(
    histories(
        "credit",
        {
            "receipt": receipt.map(
                lambda payload: (
                    payload
                    | {
                        "tokens": (
                            tokens_up_to(payload["last"]) - tokens_up_to(payload["first"] - 1)
                        ),
                        "total": tokens_up_to(payload["last"]),
                    }
                )
            )
        },
    )
)
def test_overlapping_ranges_count_exactly_if_the_author_signed_totals(facts):
    covered = {seq for item in facts for seq in range(item.payload.first, item.payload.last + 1)}
    exact = sum(tokens_up_to(seq) - tokens_up_to(seq - 1) for seq in covered)
    assert sum(day["tokens"] for day in fold("credit", facts)["days"].values()) == exact


@HISTORIES
@given(
    histories(
        "credit",
        {
            "receipt": st.builds(
                lambda payload, total: payload | {"total": total}, receipt, st.integers(0, 500)
            )
        },
    ),
    st.integers(),
)
def test_receipts_that_lie_count_no_more_than_was_signed(facts, seed):
    assert_one_state("credit", facts, seed)
    counted = [day["tokens"] for day in fold("credit", facts)["days"].values()]
    assert min(counted) >= 0 and sum(counted) <= max(item.payload.total for item in facts)


@pytest.mark.django_db
def test_state_is_stored_once_its_machine_and_run_exist(mirrors):
    days = {"2026-01-01": {"first": 1, "last": 4, "tokens": 400, "witness": None}}
    run, key, life = mirrors.run.pk, mirrors.author.identity.key, "a" * 16
    early = {f"{run}:{'0' * 64}:{life}", f"{uuid4()}:{key}:{life}"}
    for name in early:
        with pytest.raises(DependencyMissingError):
            store(name, {"days": days})
    name = f"{run}:{key}:{life}"
    all_states = {each: {"days": days} for each in (*early, name)}
    assert store_batch(all_states) == {name}
    for _ in range(2):
        assert list(Credit.objects.values_list("first", "last", "tokens")) == [(1, 4, 400)]
        store(name, {"days": days})
    assert store_batch(all_states) == set(), "`store` compares rows that exist"
    store(name, None)
    assert not Credit.objects.exists()


# ---- crews

MEMBERS = sorted(Identity(bytes([number]) * 32).key for number in range(60, 63))


def crew_up_to(seq: int, count: int = 3) -> list[dict]:
    """Return what some members computed of an author's updates: a tenth, two and three tenths."""
    return [
        {"key": key, "tokens": tokens_up_to(seq) * (number + 1) // 10}
        for number, key in enumerate(MEMBERS[:count])
    ]


crew_receipt = st.builds(
    lambda payload, count: (
        payload
        | {
            "tokens": tokens_up_to(payload["last"]) - tokens_up_to(payload["first"] - 1),
            "total": tokens_up_to(payload["last"]),
            "crew": crew_up_to(payload["last"], count),
        }
    ),
    receipt,
    st.integers(0, 3),
)
lying_crew = st.lists(
    st.builds(
        lambda key, tokens: {"key": key, "tokens": tokens},
        st.sampled_from(MEMBERS),
        st.integers(0, 900),
    ),
    max_size=3,
)


def parts_of_crew(days) -> dict[str, int]:
    """Return the tokens of each member, over all days."""
    parts: dict[str, int] = {}
    for values in days.values():
        assert sum(values.get("crew", {}).values()) <= values["tokens"]
        for key, tokens in values.get("crew", {}).items():
            assert tokens > 0
            parts[key] = parts.get(key, 0) + tokens
    return parts


@HISTORIES
@given(histories("credit", {"receipt": crew_receipt}), st.integers())
def test_crews_receipts_give_one_state_and_no_more_than_signed(facts, seed):
    assert_one_state("credit", facts, seed)
    days = fold("credit", facts)["days"]
    signed = {share["key"]: share["tokens"] for share in crew_up_to(30)}
    for key, tokens in parts_of_crew(days).items():
        assert tokens <= signed[key]


@HISTORIES
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8, unique=True))
def test_members_have_what_was_signed_if_receipts_are_complete(ends):
    drafts = [
        {
            "day": f"2026-01-0{1 + number % 3}",
            "first": first + 1,
            "last": last,
            "tokens": tokens_up_to(last) - tokens_up_to(first),
            "total": tokens_up_to(last),
            "crew": crew_up_to(last),
        }
        for number, (first, last) in enumerate(zip([0, *sorted(ends)], sorted(ends), strict=False))
    ]
    history = [(number, "receipt", draft) for number, draft in enumerate(drafts)]
    days = fold_history("credit", *history)["days"]
    parts = parts_of_crew(days)
    assert sum(values["tokens"] for values in days.values()) == tokens_up_to(max(ends))
    for share in crew_up_to(max(ends)):
        assert share["tokens"] - len(ends) <= parts.get(share["key"], 0) <= share["tokens"]


@HISTORIES
@given(
    histories(
        "credit",
        {
            "receipt": st.builds(
                lambda payload, total, crew: payload | {"total": total, "crew": crew},
                receipt,
                st.none() | st.integers(0, 500),
                lying_crew,
            )
        },
    ),
    st.integers(),
)
def test_receipts_that_lie_of_crews_move_no_more_than_counts(facts, seed):
    assert_one_state("credit", facts, seed)
    parts_of_crew(fold("credit", facts)["days"])


def total_by_machine() -> dict:
    """Return machine → its credit."""
    sums: dict = {}
    for machine, tokens in Credit.objects.values_list("machine", "tokens"):
        sums[machine] = sums.get(machine, 0) + tokens
    return sums


@pytest.mark.django_db
def test_crews_tokens_go_to_members_who_joined_as_such(mirrors, volunteer, person):
    carl = volunteer(person("carl@example.org", name="Carl"), 4)
    dora = volunteer(mirrors.author.machine.owner, 5)
    assert carl.request_join(mirrors.run, purpose=JoinPurpose.CREW).status_code == 200
    dora.join(mirrors.run)
    stranger = Identity(bytes([60]) * 32).key
    keys = [carl.identity.key, dora.identity.key, stranger]
    for seq in (2, 2, 5):
        crew = [CrewShare(key=key, tokens=tokens_up_to(seq) // 4) for key in sorted(keys)]
        head = sign_header(
            mirrors.run, mirrors.author, seq, tokens_up_to(seq), mirrors.incarnation, crew
        )
        statement = true_statement(mirrors.run, head)
        attestation = sign_attestation(mirrors.witness.identity, head, statement)
        attestations.record_attestations([(mirrors.member, [attestation])])
        tasks.record_events()
    quarter, whole = tokens_up_to(5) // 4, tokens_up_to(5)
    credited = total_by_machine()
    assert quarter - 2 <= credited[carl.machine.pk] <= quarter
    assert credited[mirrors.author.machine.pk] == whole - credited[carl.machine.pk]
    assert set(credited) == {carl.machine.pk, mirrors.author.machine.pk}
    assert tasks.record_events() == 0 and mirrors.credited_tokens() == whole
    carls = volunteer_record(carl.machine.owner)
    assert (carls.tokens, carls.updates) == (credited[carl.machine.pk], 0)
    names = {row.name: row.tokens for row in leaderboard("people")}
    assert names["Carl"] == carls.tokens and sum(names.values()) == whole
    assert Run.objects.get().credits.filter(lead=None).count() == 1
    both = replicated_rows(), projection.state_hash()
    assert rebuild_in_one_batch(all_events(), all_private_data()) == both


@pytest.mark.django_db
def test_part_of_a_member_who_is_unknown_here_stays_until_it_is_known(mirrors, volunteer, person):
    carl = volunteer(person("carl@example.org", name="Carl"), 4)
    unknown = MEMBERS[0]
    crew = {carl.identity.key: 30, unknown: 20}
    days = {"2026-01-01": {"first": 1, "last": 4, "tokens": 99, "witness": None, "crew": crew}}
    name = f"{mirrors.run.pk}:{mirrors.author.identity.key}:{'a' * 16}"
    assert store_batch({name: {"days": days}}) == set()
    for _ in range(2):
        assert store(name, {"days": days}) == [f"machine:{unknown}"]
        assert total_by_machine() == {carl.machine.pk: 30, mirrors.author.machine.pk: 69}
    store(name, None)
    assert not Credit.objects.exists()
