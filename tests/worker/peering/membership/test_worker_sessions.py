"""A copied key is proven by what it signs elsewhere; a restart and old statements prove nothing."""

import pytest

from barnraise.peering.membership.worker_sessions import (
    CLOCK_SECONDS,
    MAX_KEYS,
    MAX_SESSIONS,
    SESSION_FRESH_SECONDS,
    OwnSession,
    SeenSessions,
    is_newer,
    proves_copy,
)
from barnraise.protocol.messages import WorkerSession
from barnraise.protocol.signing import Identity

RUN = "01890000-0000-7000-8000-000000000001"
NOW = 1e9
OWN = OwnSession("a" * 16, NOW - 1000)


def state(session: str = "b" * 16, issued: float = NOW, started: float = NOW - 50, number: int = 1):
    """Return a statement of a session."""
    key = Identity(number.to_bytes(32, "big")).key
    return WorkerSession(run=RUN, peer=key, session=session, started=started, issued=issued)


@pytest.mark.parametrize(
    ("statement", "started", "is_proof"),
    [
        (state(), NOW - 1000, True),
        (state(session="a" * 16), NOW - 1000, False),  # its own
        (state(), NOW + 1, False),  # of the worker that ran here before a restart
        (state(), NOW - CLOCK_SECONDS / 2, False),  # clocks differ by as much
        (state(issued=NOW - 2 * SESSION_FRESH_SECONDS), NOW - 1000, False),  # somebody kept it
        (state(issued=NOW + 2 * SESSION_FRESH_SECONDS), NOW - 1000, False),
    ],
)
def test_statement_proves_a_copy_only_if_signed_elsewhere_while_this_ran(
    statement, started, is_proof
):
    assert proves_copy(OwnSession(OWN.session, started), statement, NOW) is is_proof


def test_exactly_one_of_two_workers_has_to_stop():
    for started in (NOW - 2000, NOW - 1000, NOW - 50):
        other = state(started=started)
        its_own = OwnSession(other.session, other.started)
        mine = state(session=OWN.session, started=OWN.started)
        assert is_newer(OWN, other) is not is_newer(its_own, mine)


def test_peer_passes_on_the_newest_statement_of_other_sessions_while_fresh():
    seen, key = SeenSessions(), state().peer
    signer = Identity((1).to_bytes(32, "big"))
    for issued in (NOW - 9, NOW - 1, NOW - 5):
        statement = state(issued=issued)
        seen.record(statement, signer.sign("session", statement))
    (other,) = seen.others(key, OWN.session, NOW)
    assert WorkerSession.model_validate_json(other.body).issued == NOW - 1
    assert not [*seen.others(key, "b" * 16, NOW)]
    assert not [*seen.others(key, OWN.session, NOW + 2 * SESSION_FRESH_SECONDS)]
    assert not [*seen.others("0" * 64, OWN.session, NOW)]


def test_memory_of_sessions_and_keys_is_bounded():
    seen, signed = SeenSessions(), Identity(b"1" * 32).sign("session", state())
    for number in range(2 * MAX_SESSIONS):
        seen.record(state(session=f"{number:016x}"), signed)
    assert len([*seen.others(state().peer, OWN.session, NOW)]) == MAX_SESSIONS
    for number in range(2, MAX_KEYS + 3):
        seen.record(state().model_copy(update={"peer": f"{number:064x}"}), signed)
    assert not [*seen.others(state().peer, OWN.session, NOW)]
