"""This machine's Ed25519 key: who signed what, and who may speak to whom.

Signatures cover `barnraise/<kind>/v1\\0` and the exact text received, never a re-serialisation, so that a reader need
not agree with a writer about how JSON is spelled. Requests to a coordinator carry a JWT made afresh for each: nothing
that is stolen from a log or a disk but the key itself lets another machine speak for this one.
"""

import secrets
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
from barnraise.protocol.types import Message

REQUEST_SECONDS = 60  # a request's signature lives no longer
CLAIMS = ("aud", "htm", "htu", "body", "iat", "exp", "jti")
TICKET_GRACE_SECONDS = 2 * 3600  # clocks differ
ORPHANED_TICKET_GRACE_SECONDS = (
    14 * 86400
)  # …and this long past expiry while no mirror has answered for an hour

M = TypeVar("M", bound=Message)


class Identity:
    """An Ed25519 key pair. `key` is the public half, 64 hex digits: the machine's name to peers and coordinators."""

    def __init__(self, secret: bytes):
        self.secret = secret
        self._private = Ed25519PrivateKey.from_private_bytes(secret)
        self.key = self._private.public_key().public_bytes_raw().hex()

    @classmethod
    def load_or_create(cls, path: Path) -> "Identity":
        """The key kept in `path`, made on first use; readable by its owner alone."""
        if not path.exists():
            write_atomically(path, secrets.token_bytes(32), private=True)
        return cls(path.read_bytes())

    def sign(self, kind: str, message: Message) -> Signed:
        body = message.model_dump_json()
        return Signed(
            key=self.key, body=body, signature=self._private.sign(_covered(kind, body)).hex()
        )

    def sign_request(self, audience: str, method: str, path: str, body: bytes, now: float) -> str:
        """A JWT for one request: bound to the mirror, the method, the path and the body, spent once, ≤ 60 s old."""
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
    return blake3(text.encode() if isinstance(text, str) else text).hexdigest()


def _covered(kind: str, body: str) -> bytes:
    return f"barnraise/{kind}/v1\0{body}".encode()


def open_signed(signed: Signed, kind: str, shape: type[M], key: str | None = None) -> M:
    """The message inside, once its signature holds (by `key`, when one is named). Raises MessageError."""
    if key is not None and signed.key != key:
        raise MessageError(f"the {kind} is signed by {signed.key[:8]}, not by {key[:8]}")
    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(signed.key))
        public.verify(bytes.fromhex(signed.signature), _covered(kind, signed.body))
        return shape.model_validate_json(signed.body)
    except (InvalidSignature, ValueError) as error:
        what = (
            "its signature does not match"
            if isinstance(error, InvalidSignature)
            else "it is malformed"
        )
        raise MessageError(f"the {kind} by {signed.key[:8]} is refused: {what}") from None


def check_ticket(
    signed: Signed,
    *,
    run: str,
    peer: str,
    mirrors: frozenset[str],
    revoked: frozenset[str],
    now: float,
    orphaned: bool,
) -> Ticket:
    """Whether `peer` may speak in `run` now. `orphaned`: no mirror has answered for an hour. Raises TicketError."""
    try:
        ticket = open_signed(signed, "ticket", Ticket)
    except MessageError as error:
        raise TicketError(str(error)) from None
    if signed.key not in mirrors or ticket.mirror != signed.key:
        raise TicketError(
            f"the ticket is signed by {signed.key[:8]}, which is not a mirror of this run"
        )
    if ticket.run != run:
        raise TicketError(f"the ticket is for run {ticket.run}, not {run}")
    if ticket.peer != peer:
        raise TicketError(f"the ticket is for peer {ticket.peer[:8]}, and {peer[:8]} showed it")
    if peer in revoked:
        raise TicketError(f"peer {peer[:8]} was revoked")
    if now > ticket.expires + (ORPHANED_TICKET_GRACE_SECONDS if orphaned else TICKET_GRACE_SECONDS):
        raise TicketError(
            f"the ticket of {peer[:8]} expired {(now - ticket.expires) / 3600:.1f} hours ago"
        )
    return ticket


def check_attestation(told: Attestation, run: str, witness: str | None = None) -> Update:
    """The author's update that a machine (`witness`, where one is named) says it has applied, with all before it, once
    both signatures hold and are about each other. Raises MessageError."""
    update, said = (
        open_signed(told.head, "update", Update),
        open_signed(told.statement, "attestation", AttestationStatement, witness),
    )
    if update.peer != told.head.key:
        raise MessageError(f"an update of {update.peer[:8]} is signed by {told.head.key[:8]}")
    if {update.run, said.run} != {run}:
        raise MessageError(f"what {told.statement.key[:8]} witnesses is not all of run {run}")
    if (said.author, said.head) != (update.author, digest(told.head.body)):
        raise MessageError(
            f"what {told.statement.key[:8]} witnesses is not the update it comes with"
        )
    return update


def check_request(
    token: str, audience: str, method: str, path: str, body: bytes, now: float
) -> tuple[str, str]:
    """(machine key, jti) of a signed request. The caller spends the jti. Raises MessageError."""
    try:
        key = jwt.get_unverified_header(token).get("kid", "")
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
        claims = jwt.decode(
            token,
            public,
            algorithms=["EdDSA"],
            audience=audience,
            options={
                "require": list(CLAIMS),
                "verify_exp": False,
                "verify_iat": False,
            },  # times: by `now`, below
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
            f"the request was signed at {issued}, here it is {int(now)}: use the time in this answer"
        )
    if not 16 <= len(jti) <= 64:
        raise MessageError("the request's jti must be 16 to 64 characters")
    return key, jti
