"""Tickets and signed requests: what is believed, and what is refused with which reason."""

import jwt
import pytest

from barnraise.errors import MessageError, TicketError
from barnraise.protocol.coordinator_messages import ServerTime
from barnraise.protocol.enums import Role
from barnraise.protocol.messages import Ticket
from barnraise.protocol.signing import (  # fmt: skip
    ORPHANED_TICKET_GRACE_SECONDS,
    REQUEST_SECONDS,
    TICKET_GRACE_SECONDS,
    Identity,
    check_request,
    check_ticket,
    open_signed,
)

RUN = "01890000-0000-7000-8000-000000000001"
OTHER = "01890000-0000-7000-8000-000000000002"
PEER, MIRROR, STRANGER = (Identity(bytes([n]) * 32) for n in (1, 2, 3))
EXPIRES = 1_000_000.0


def ticket(by=MIRROR, **changed):
    parts = dict(
        run=RUN, peer=PEER.key, machine=RUN, volunteer="0" * 64, roles=[Role.WORKER], issued=0.0, expires=EXPIRES,
        mirror=MIRROR.key,
    )  # fmt: skip
    return by.sign("ticket", Ticket(**(parts | changed)))


def checked(signed, now=EXPIRES - 1, revoked=frozenset(), orphaned=False, peer=PEER.key):
    mirrors = frozenset([MIRROR.key])
    return check_ticket(
        signed, run=RUN, peer=peer, mirrors=mirrors, revoked=revoked, now=now, orphaned=orphaned
    )


@pytest.mark.parametrize(
    ("now", "orphaned", "holds"),
    [
        (EXPIRES - 1, False, True),
        (0.0, False, True),  # issued later than our clock says: not looked at
        (EXPIRES + TICKET_GRACE_SECONDS - 1, False, True),
        (EXPIRES + TICKET_GRACE_SECONDS + 1, False, False),
        (EXPIRES + TICKET_GRACE_SECONDS + 1, True, True),
        (EXPIRES + ORPHANED_TICKET_GRACE_SECONDS - 1, True, True),
        (EXPIRES + ORPHANED_TICKET_GRACE_SECONDS + 1, True, False),
    ],
)
def test_a_ticket_holds_past_its_expiry_for_two_hours_or_two_weeks_without_coordinators(
    now, orphaned, holds
):
    if holds:
        assert checked(ticket(), now, orphaned=orphaned).peer == PEER.key
    else:
        with pytest.raises(TicketError, match="expired"):
            checked(ticket(), now, orphaned=orphaned)


@pytest.mark.parametrize(
    ("signed", "options", "why"),
    [
        (ticket(run=OTHER), {}, f"is for run {OTHER}"),
        (ticket(), {"peer": STRANGER.key}, "is for peer"),
        (ticket(by=STRANGER), {}, "is not a mirror of this run"),
        (ticket(by=STRANGER, mirror=STRANGER.key), {}, "is not a mirror of this run"),
        (ticket(mirror=STRANGER.key), {}, "is not a mirror of this run"),
        (ticket(), {"revoked": frozenset([PEER.key]), "orphaned": True}, "was revoked"),
        (
            ticket().model_copy(update={"body": ticket(expires=9e9).body}),
            {},
            "signature does not match",
        ),
        (
            MIRROR.sign("time", ServerTime(mirror=MIRROR.key, time=1)),
            {},
            "signature does not match",
        ),
    ],
)
def test_a_ticket_of_another_run_peer_or_hand_or_a_revoked_ones_is_refused(signed, options, why):
    with pytest.raises(TicketError, match=why):
        checked(signed, **options)


def test_a_signature_of_one_kind_is_none_of_another_and_names_its_signer():
    signed = PEER.sign("time", ServerTime(mirror=MIRROR.key, time=1))
    assert open_signed(signed, "time", ServerTime, PEER.key).time == 1
    with pytest.raises(MessageError, match="signature does not match"):
        open_signed(signed, "directive", ServerTime)
    with pytest.raises(MessageError, match="is signed by"):
        open_signed(signed, "time", ServerTime, MIRROR.key)


REQUEST = dict(audience=MIRROR.key, method="POST", path="/api/v1/x?y=1", body=b"{}")


def test_a_signed_request_is_believed_once_it_is_for_us_and_fresh():
    token = PEER.sign_request(**REQUEST, now=1000.0)
    assert check_request(token, **REQUEST, now=1030.0)[0] == PEER.key


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"audience": STRANGER.key}, "refused"),
        ({"method": "GET"}, "another request"),
        ({"path": "/api/v1/x"}, "another request"),
        ({"body": b"{ }"}, "another request"),
        ({"now": 1000.0 + REQUEST_SECONDS + 1}, "use the time in this answer"),
        ({"now": 1000.0 - REQUEST_SECONDS - 1}, "use the time in this answer"),
    ],
)
def test_a_request_to_another_path_body_mirror_or_time_is_refused(changed, why):
    token = PEER.sign_request(**REQUEST, now=1000.0)
    with pytest.raises(MessageError, match=why):
        check_request(token, **({**REQUEST, "now": 1030.0} | changed))


def test_a_token_of_another_algorithm_without_a_claim_or_that_lives_too_long_is_refused():
    good = jwt.decode(PEER.sign_request(**REQUEST, now=1000.0), options={"verify_signature": False})
    key = {"kid": PEER.key}
    forged = [
        jwt.encode(good, "secret-of-at-least-thirty-two-bytes!", algorithm="HS256", headers=key),
        jwt.encode(good, None, algorithm="none", headers=key),
        jwt.encode(good, STRANGER._private, algorithm="EdDSA", headers=key),
        jwt.encode({**good, "exp": 9_999}, PEER._private, algorithm="EdDSA", headers=key),
        jwt.encode({**good, "jti": "short"}, PEER._private, algorithm="EdDSA", headers=key),
        jwt.encode({**good, "iat": 1e400}, PEER._private, algorithm="EdDSA", headers=key),
        *(
            jwt.encode(
                {k: v for k, v in good.items() if k != name},
                PEER._private,
                algorithm="EdDSA",
                headers=key,
            )
            for name in good
        ),
        jwt.encode(good, PEER._private, algorithm="EdDSA"),
        "not.a.token",
        "",
    ]
    for token in forged:
        with pytest.raises(MessageError):
            check_request(token, **REQUEST, now=1000.0)
