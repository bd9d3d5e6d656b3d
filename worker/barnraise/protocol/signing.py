r"""Ed25519 signatures: of messages, of requests to a coordinator, and the checks of both.

A signature covers `barnraise/<kind>/v1\0` and the exact text that was received, never a
re-serialisation: reader and writer need not agree on how JSON is formatted. Each request to a
coordinator carries a fresh JWT, so that nothing stolen from a log or a disk, except the key itself,
lets another machine impersonate this one.
"""

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import jwt
from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from barnraise.durable_io import write_atomically
from barnraise.errors import MessageError, TicketError
from barnraise.protocol.coordinator_messages import Attestation, AttestationStatement
from barnraise.protocol.messages import Signed, Ticket, Update
from barnraise.protocol.public_keys import require_sound_key
from barnraise.protocol.types import Message

REQUEST_SECONDS = 60  # validity of a request's signature
CLAIMS = ("aud", "htm", "htu", "body", "iat", "exp", "jti")  # of a request's JWT
TICKET_GRACE_SECONDS = 2 * 3600  # past a ticket's expiry, because clocks differ
ORPHANED_TICKET_GRACE_SECONDS = 14 * 86400  # instead, while no mirror has answered for an hour

M = TypeVar("M", bound=Message)


class Identity:
    """An Ed25519 key pair.

    Attributes:
        key: the public key as 64 hex digits, by which peers and coordinators know the machine.
        secret: the private key's 32 bytes.
    """

    def __init__(self, secret: bytes) -> None:
        """Derive the public key from the private key's 32 bytes."""
        self.secret = secret
        self._private = Ed25519PrivateKey.from_private_bytes(secret)
        self.key = self._private.public_key().public_bytes_raw().hex()

    @classmethod
    def load_or_create(cls, path: Path) -> "Identity":
        """Load the key stored at `path`; create it on first use, readable only by its owner."""
        if not path.exists():
            write_atomically(path, secrets.token_bytes(32), private=True)
        return cls(path.read_bytes())

    def sign(self, kind: str, message: Message) -> Signed:
        """Sign a message as a document of `kind`."""
        body = message.model_dump_json()
        signature = self._private.sign(_signed_bytes(kind, body)).hex()
        return Signed(key=self.key, body=body, signature=signature)

    def sign_request(self, audience: str, method: str, path: str, body: bytes, now: float) -> str:
        """Sign a request to the coordinator whose key is `audience`.

        Returns:
            A JWT that is bound to the coordinator, the method, the path and the body. It can be
            used once, within `REQUEST_SECONDS` of `now` (seconds since 1970).
        """
        claims = {
            "aud": audience,
            "htm": method,
            "htu": path,
            "body": blake3(body).hexdigest(),
            "iat": int(now),
            "exp": int(now) + REQUEST_SECONDS,
            "jti": secrets.token_hex(16),
        }
        return jwt.encode(claims, self._private, algorithm="EdDSA", headers={"kid": self.key})


def digest(text: str | bytes) -> str:
    """Return the BLAKE3 digest as 64 hex digits."""
    return blake3(text.encode() if isinstance(text, str) else text).hexdigest()


def _signed_bytes(kind: str, body: str) -> bytes:
    return f"barnraise/{kind}/v1\0{body}".encode()


def _load_public_key(key: str) -> Ed25519PublicKey:
    """Load a key of 64 hex digits.

    Raises:
        ValueError: It is malformed, a point of small order, or a second spelling.
    """
    return Ed25519PublicKey.from_public_bytes(bytes.fromhex(require_sound_key(key)))


def open_signed(signed: Signed, kind: str, shape: type[M], key: str | None = None) -> M:
    """Verify a signed document of this kind, by this key if one is given, and parse its message.

    Raises:
        MessageError: The signature or the message is wrong.
    """
    if key is not None and signed.key != key:
        raise MessageError(f"the {kind} is signed by {signed.key[:8]}, not by {key[:8]}")
    try:
        public_key = _load_public_key(signed.key)
        public_key.verify(bytes.fromhex(signed.signature), _signed_bytes(kind, signed.body))
        return shape.model_validate_json(signed.body)
    except InvalidSignature:
        reason = "its signature does not match"
    except ValueError:
        reason = "it is malformed"
    raise MessageError(f"the {kind} by {signed.key[:8]} is refused: {reason}")


@dataclass(frozen=True)
class TicketPolicy:
    """What a run accepts as a ticket."""

    run: str
    mirrors: frozenset[str]  # keys of the mirrors whose tickets are valid in the run
    revoked: frozenset[str] = frozenset()  # keys of peers whose tickets are revoked
    # No mirror has answered for an hour, so expired tickets stay valid for longer.
    orphaned: bool = False


def check_ticket(signed: Signed, peer: str, policy: TicketPolicy, now: float) -> Ticket:
    """Return the ticket if it permits `peer` to take part in the run at `now`.

    Raises:
        TicketError: The ticket is not valid; the text says why.
    """
    try:
        ticket = open_signed(signed, "ticket", Ticket)
    except MessageError as error:
        raise TicketError(str(error)) from None
    if signed.key not in policy.mirrors or ticket.mirror != signed.key:
        raise TicketError(
            f"the ticket is signed by {signed.key[:8]}, which is not a mirror of this run"
        )
    if ticket.run != policy.run:
        raise TicketError(f"the ticket is for run {ticket.run}, not {policy.run}")
    if ticket.peer != peer:
        raise TicketError(f"the ticket is for peer {ticket.peer[:8]}, and {peer[:8]} showed it")
    if peer in policy.revoked:
        raise TicketError(f"peer {peer[:8]} was revoked")
    grace = ORPHANED_TICKET_GRACE_SECONDS if policy.orphaned else TICKET_GRACE_SECONDS
    if now > ticket.expires + grace:
        raise TicketError(
            f"the ticket of {peer[:8]} expired {(now - ticket.expires) / 3600:.1f} hours ago"
        )
    return ticket


def check_attestation(attestation: Attestation, run: str, attester: str | None = None) -> Update:
    """Verify both signatures of an attestation and that they belong together.

    Returns:
        The header of the author's last update that the machine has applied.

    Raises:
        MessageError: The attestation proves nothing; the text says why.
    """
    update = open_signed(attestation.head, "update", Update)
    signed_statement = attestation.statement
    statement = open_signed(signed_statement, "attestation", AttestationStatement, attester)
    author_key, attester_key = attestation.head.key, signed_statement.key
    if update.peer != author_key:
        raise MessageError(f"an update of {update.peer[:8]} is signed by {author_key[:8]}")
    if {update.run, statement.run} != {run}:
        raise MessageError(f"what {attester_key[:8]} attests is not all of run {run}")
    if (statement.author, statement.head) != (update.author, digest(attestation.head.body)):
        raise MessageError(f"what {attester_key[:8]} attests is not the update it comes with")
    return update


def check_request(
    token: str, audience: str, method: str, path: str, body: bytes, now: float
) -> tuple[str, str]:
    """Verify the signature of a request that the coordinator with the key `audience` received.

    Returns:
        The machine's key and the JWT's id. The caller makes sure that each id is used only once.

    Raises:
        MessageError: The signature is not valid for this request; the text says why.
    """
    try:
        key = jwt.get_unverified_header(token).get("kid", "")
        public_key = _load_public_key(key)
        claims = jwt.decode(
            token,
            public_key,
            algorithms=["EdDSA"],
            audience=audience,
            # The times are verified below, by `now`.
            options={"require": list(CLAIMS), "verify_exp": False, "verify_iat": False},
        )
        issued, expires, jti = int(claims["iat"]), int(claims["exp"]), str(claims["jti"])
    except (jwt.InvalidTokenError, ValueError, TypeError, OverflowError) as error:
        raise MessageError(f"the request's signature is refused: {error}") from None
    if not (
        claims["htm"] == method
        and claims["htu"] == path
        and claims["body"] == blake3(body).hexdigest()
    ):
        raise MessageError("the request's signature is for another request")
    if expires - issued > REQUEST_SECONDS or not issued - REQUEST_SECONDS <= now <= expires:
        raise MessageError(
            f"the request was signed at {issued}, here it is {int(now)}: "
            "use the time in this answer"
        )
    if not 16 <= len(jti) <= 64:
        raise MessageError("the request's jti must be 16 to 64 characters")
    return key, jti
