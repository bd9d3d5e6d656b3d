"""Tickets and signed requests: which are accepted, and why others are refused."""

import base64

import jwt
import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from barnraise.errors import MessageError, TicketError
from barnraise.protocol import signing
from barnraise.protocol.coordinator_messages import ServerTime
from barnraise.protocol.enums import Role
from barnraise.protocol.messages import Signed, Ticket
from barnraise.protocol.public_keys import key_problem

RUN = "01890000-0000-7000-8000-000000000001"
OTHER = "01890000-0000-7000-8000-000000000002"
PEER, MIRROR, STRANGER = (signing.Identity(bytes([n]) * 32) for n in (1, 2, 3))
EXPIRES = 1_000_000.0


def private_key(identity: signing.Identity) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(identity.secret)


def sign_ticket(by=MIRROR, **changed):
    parts = dict(
        run=RUN,
        peer=PEER.key,
        machine=RUN,
        volunteer="0" * 64,
        roles=[Role.WORKER],
        max_tokens_per_second=1000,
        issued=0.0,
        expires=EXPIRES,
        mirror=MIRROR.key,
    )
    return by.sign("ticket", Ticket(**(parts | changed)))


def check(signed, now=EXPIRES - 1, revoked=frozenset(), orphaned=False, peer=PEER.key):
    mirrors = frozenset([MIRROR.key])
    policy = signing.TicketPolicy(RUN, mirrors, revoked, orphaned)
    return signing.check_ticket(signed, peer, policy, now)


@pytest.mark.parametrize(
    ("now", "orphaned", "valid"),
    [
        (EXPIRES - 1, False, True),
        (0.0, False, True),  # the time of issue is not checked: clocks differ
        (EXPIRES + signing.TICKET_GRACE_SECONDS - 1, False, True),
        (EXPIRES + signing.TICKET_GRACE_SECONDS + 1, False, False),
        (EXPIRES + signing.TICKET_GRACE_SECONDS + 1, True, True),
        (EXPIRES + signing.ORPHANED_TICKET_GRACE_SECONDS - 1, True, True),
        (EXPIRES + signing.ORPHANED_TICKET_GRACE_SECONDS + 1, True, False),
    ],
)
def test_expired_ticket_is_valid_for_two_hours_or_orphaned_two_weeks(now, orphaned, valid):
    if valid:
        assert check(sign_ticket(), now, orphaned=orphaned).peer == PEER.key
    else:
        with pytest.raises(TicketError, match="expired"):
            check(sign_ticket(), now, orphaned=orphaned)


@pytest.mark.parametrize(
    ("signed", "options", "why"),
    [
        (sign_ticket(run=OTHER), {}, f"is for run {OTHER}"),
        (sign_ticket(), {"peer": STRANGER.key}, "is for peer"),
        (sign_ticket(by=STRANGER), {}, "is not a mirror of this run"),
        (sign_ticket(by=STRANGER, mirror=STRANGER.key), {}, "is not a mirror of this run"),
        (sign_ticket(mirror=STRANGER.key), {}, "is not a mirror of this run"),
        (sign_ticket(), {"revoked": frozenset([PEER.key]), "orphaned": True}, "was revoked"),
        (
            sign_ticket().model_copy(update={"body": sign_ticket(expires=9e9).body}),
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
def test_ticket_of_another_run_peer_or_signer_is_refused(signed, options, why):
    with pytest.raises(TicketError, match=why):
        check(signed, **options)


def test_signature_is_for_one_kind_and_one_signer():
    signed = PEER.sign("time", ServerTime(mirror=MIRROR.key, time=1))
    assert signing.open_signed(signed, "time", ServerTime, PEER.key).time == 1
    with pytest.raises(MessageError, match="signature does not match"):
        signing.open_signed(signed, "directive", ServerTime)
    with pytest.raises(MessageError, match="is signed by"):
        signing.open_signed(signed, "time", ServerTime, MIRROR.key)


REQUEST = dict(audience=MIRROR.key, method="POST", path="/api/v1/x?y=1", body=b"{}")


def test_signed_request_is_accepted_when_it_is_for_us_and_fresh():
    token = PEER.sign_request(**REQUEST, now=1000.0)
    assert signing.check_request(token, **REQUEST, now=1030.0)[0] == PEER.key


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"audience": STRANGER.key}, "refused"),
        ({"method": "GET"}, "another request"),
        ({"path": "/api/v1/x"}, "another request"),
        ({"body": b"{ }"}, "another request"),
        ({"now": 1000.0 + signing.REQUEST_SECONDS + 1}, "use the time in this answer"),
        ({"now": 1000.0 - signing.REQUEST_SECONDS - 1}, "use the time in this answer"),
    ],
)
def test_request_for_another_path_body_mirror_or_time_is_refused(changed, why):
    token = PEER.sign_request(**REQUEST, now=1000.0)
    with pytest.raises(MessageError, match=why):
        signing.check_request(token, **({**REQUEST, "now": 1030.0} | changed))


def test_token_with_wrong_algorithm_claims_or_lifetime_is_refused():
    good = jwt.decode(PEER.sign_request(**REQUEST, now=1000.0), options={"verify_signature": False})
    key = {"kid": PEER.key}
    forged = [
        jwt.encode(good, "secret-of-at-least-thirty-two-bytes!", algorithm="HS256", headers=key),
        jwt.encode(good, None, algorithm="none", headers=key),
        jwt.encode(good, private_key(STRANGER), algorithm="EdDSA", headers=key),
        jwt.encode({**good, "exp": 9_999}, private_key(PEER), algorithm="EdDSA", headers=key),
        jwt.encode({**good, "jti": "short"}, private_key(PEER), algorithm="EdDSA", headers=key),
        jwt.encode({**good, "iat": 1e400}, private_key(PEER), algorithm="EdDSA", headers=key),
        *(
            jwt.encode(
                {k: v for k, v in good.items() if k != name},
                private_key(PEER),
                algorithm="EdDSA",
                headers=key,
            )
            for name in good
        ),
        jwt.encode(good, private_key(PEER), algorithm="EdDSA"),
        "not.a.token",
        "",
    ]
    for token in forged:
        with pytest.raises(MessageError):
            signing.check_request(token, **REQUEST, now=1000.0)


SMALL_ORDER_KEYS = [
    "01" + 31 * "00",
    31 * "00" + "00",
    31 * "00" + "80",
    "ec" + 30 * "ff" + "7f",
    "ec" + 30 * "ff" + "ff",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85",
]
SECOND_SPELLINGS = ["ed" + 30 * "ff" + "7f", "ee" + 30 * "ff" + "ff", 32 * "ff"]


@pytest.mark.parametrize("key", [*SMALL_ORDER_KEYS, *SECOND_SPELLINGS])
def test_key_that_anybody_can_sign_for_is_no_public_key(key):
    with pytest.raises(ValueError, match=r"small order|second spelling"):
        Signed(key=key, body="{}", signature=64 * "00")


def test_one_signature_for_all_messages_of_a_small_order_key_is_refused():
    # For the neutral element as key, R = S·B is valid for any message; with S = 0 it is R = 1.
    forged = Signed.model_construct(key=SMALL_ORDER_KEYS[0], body="{}", signature="01" + 63 * "00")
    public_key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(forged.key))
    public_key.verify(bytes.fromhex(forged.signature), b"any message")  # the library accepts it
    with pytest.raises(MessageError):
        signing.open_signed(forged, "time", ServerTime)


def test_request_signed_for_a_small_order_key_is_refused():
    claims = {
        "aud": MIRROR.key, "htm": "GET", "htu": "/", "body": blake3(b"").hexdigest(),
        "iat": 100, "exp": 150, "jti": 32 * "a",
    }  # fmt: skip
    headers = {"kid": SMALL_ORDER_KEYS[0]}
    honest = jwt.encode(claims, private_key(PEER), algorithm="EdDSA", headers=headers)
    signature = base64.urlsafe_b64encode(bytes([1]) + bytes(63)).rstrip(b"=").decode()
    token = f"{honest.rpartition('.')[0]}.{signature}"
    with pytest.raises(MessageError, match="small order"):
        signing.check_request(token, MIRROR.key, "GET", "/", b"", 100)


@given(st.binary(min_size=32, max_size=32))
def test_key_of_every_secret_is_sound(secret):
    assert key_problem(signing.Identity(secret).key) == ""
