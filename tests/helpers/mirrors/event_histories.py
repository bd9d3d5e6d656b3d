"""Draw random histories of events, by two mirrors at the same time, and fold them in any order."""

from random import Random

from helpers.effort import examples
from hypothesis import settings
from hypothesis import strategies as st
from uuid6 import UUID

from barnraise.protocol.signing import digest
from coordinator.eventlog import hlc, registry
from coordinator.eventlog.registry import Fact

NOW = 1_700_000_000
ONE_O_CLOCK = "2026-01-01T01:00:00Z"
HISTORIES = settings(max_examples=examples(100, 1500), deadline=None)
PEOPLE = [f"01890000-0000-7000-8000-{n:012x}" for n in range(4)]
IDS = [f"01890000-0000-7000-9000-{n:012x}" for n in range(8)]
AT = st.integers(0, 5).map(lambda n: f"2026-01-01T00:00:{n:02d}.000001Z")
DIGESTS = st.sampled_from([digest(str(n)) for n in range(4)])


def event_uuid(n: int) -> UUID:
    """Return the id of the n-th event of a history."""
    return UUID(int=n << 64 | 7 << 76 | 2 << 62)


def event_id(n: int) -> str:
    """Return the id of the n-th event of a history as payloads contain it."""
    return str(event_uuid(n))


def build_fact(type_name: str, n: int, time: int, action: str, payload: dict, *mirror: str) -> Fact:
    """Build the n-th fact of a history, stamped at `time`; of equal stamps the id decides."""
    payload_type = registry.aggregate_types()[type_name].payload_types[action]
    return Fact(
        hlc=time << hlc.COUNTER_BITS,
        id=event_uuid(n),
        digest=digest(str(n)),
        action=action,
        payload=payload_type.model_validate(payload),
        mirror="".join(mirror),
    )


def histories(
    type_name: str, payloads: dict[str, st.SearchStrategy]
) -> st.SearchStrategy[list[Fact]]:
    """Return a strategy for histories of one aggregate.

    Args:
        type_name: The aggregate type.
        payloads: Action → strategy for its payload.
    """
    change = st.one_of(
        [st.tuples(st.just(action), payload) for action, payload in payloads.items()]
    )
    timed_changes = st.lists(st.tuples(st.integers(NOW, NOW + 6), change), min_size=1, max_size=14)
    return timed_changes.map(
        lambda history: [
            build_fact(type_name, n, time, action, payload, f"{n % 2}")  # of two mirrors
            for n, (time, (action, payload)) in enumerate(history, 1)
        ]
    )


def fold(type_name: str, facts: list[Fact]):
    """Fold facts as the projection does: each once, and sorted."""
    unique = {item.digest: item for item in facts}.values()
    return registry.aggregate_types()[type_name].fold(
        sorted(unique, key=lambda item: item.order_key)
    )


def assert_one_state(type_name: str, facts: list[Fact], seed: int) -> None:
    """Check that shuffled and repeated facts fold to the same state."""
    random = Random(seed)
    received = facts + random.choices(facts, k=random.randint(0, len(facts)))
    random.shuffle(received)
    assert fold(type_name, received) == fold(type_name, facts)


def fold_history(type_name: str, *history: tuple[int, str, dict]):
    """Fold a history of (time, action, payload), whose events are numbered from 1."""
    facts = [
        build_fact(type_name, n, NOW + time, action, payload)
        for n, (time, action, payload) in enumerate(history, 1)
    ]
    return fold(type_name, facts)
