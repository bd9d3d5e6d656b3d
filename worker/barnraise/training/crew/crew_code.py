"""The code with which machines join a crew, the proof that a machine has it, and who had it.

A code is one line to copy: a prefix, and base64 of a version, the run, the lead's key, a secret of
128 bits, the lead's addresses and a checksum. Machines that have it may join the crew. They prove
the secret without sending it: by an HMAC-SHA256 over the run and both keys, which the channel
between them has proven. What a stranger records is of no use with any other key.
"""

import base64
import binascii
import hashlib
import hmac
import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from barnraise.durable_io import write_atomically
from barnraise.errors import CrewError
from barnraise.planning.crew import MAX_MEMBERS
from barnraise.protocol.public_keys import require_sound_key
from barnraise.protocol.types import Message, PublicKey

PREFIX = "crew-"
RECORD_FILE = "crew-code.json"
VERSION = 1
SECRET_BYTES = 16
MAX_CODE_ADDRESSES = 4
MAX_CODE = 800  # characters
_KEY_BYTES = 32
_RUN_BYTES = 16
_CHECKSUM_BYTES = 4
_PROOF_DOMAIN = b"barnraise/crew/v1\0"


@dataclass(frozen=True)
class CrewCode:
    """What a machine needs to find a crew's lead and to join it.

    Attributes:
        run: the run's id.
        lead: the lead's public key, in hex.
        addresses: host:port pairs of the lead, at most MAX_CODE_ADDRESSES.
        secret: 128 bits that only the crew's machines know.
    """

    run: str
    lead: str
    addresses: tuple[str, ...]
    secret: bytes = field(repr=False)

    @classmethod
    def create(
        cls, run: str, lead: str, addresses: Sequence[str], secret: bytes | None = None
    ) -> "CrewCode":
        """Return the code of a crew with that lead; without `secret`, of a new crew."""
        kept = tuple(addresses[:MAX_CODE_ADDRESSES])
        return cls(run, lead, kept, secret or secrets.token_bytes(SECRET_BYTES))

    def __str__(self) -> str:
        """Return the code as people copy it."""
        addresses = [address.encode() for address in self.addresses]
        body = b"".join(
            (
                bytes([VERSION]),
                uuid.UUID(self.run).bytes,
                bytes.fromhex(self.lead),
                self.secret,
                *(bytes([len(address)]) + address for address in addresses),
            )
        )
        text = base64.urlsafe_b64encode(body + _checksum(body)).decode().rstrip("=")
        return PREFIX + text

    def prove(self, member: str) -> str:
        """Return the proof, in hex, that the machine with this key has the code."""
        message = _PROOF_DOMAIN + self.run.encode() + bytes.fromhex(self.lead + member)
        return hmac.new(self.secret, message, hashlib.sha256).hexdigest()

    def check_proof(self, member: str, proof: str) -> bool:
        """Return whether a proof is that of the machine with this key, in constant time."""
        return hmac.compare_digest(self.prove(member).encode(), proof.encode())


def parse_code(text: str) -> CrewCode:
    """Return the code of a text.

    Raises:
        CrewError: it is no code, or was not copied as a whole.
    """
    text = text.strip()
    if not text.startswith(PREFIX) or len(text) > MAX_CODE:
        raise CrewError(
            f"this is no crew's code: it begins with '{PREFIX}', and `barnraise join RUN --crew` "
            "prints it on the lead"
        )
    encoded = text.removeprefix(PREFIX)
    try:
        data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), b"-_", validate=True)
    except (binascii.Error, ValueError):
        data = b""
    body, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if len(data) <= _CHECKSUM_BYTES or not hmac.compare_digest(_checksum(body), checksum):
        raise CrewError("the crew's code is not complete, or has a typing error: copy it again")
    if body[0] != VERSION:
        raise CrewError(
            f"the crew's code has version {body[0]}, and this program reads version {VERSION}: "
            "install the same version of barnraise on all machines of the crew"
        )
    try:
        code = _parse_body(body[1:])
    except (ValueError, IndexError):
        raise CrewError("the crew's code is malformed: have the lead print a new one") from None
    if str(code) != text:
        raise CrewError("the crew's code is malformed: have the lead print a new one")
    return code


class CrewRecord(Message):
    """What a lead needs to find its crew again when it restarts, in a file of the run's folder."""

    secret: Annotated[str, Field(pattern=f"^[0-9a-f]{{{2 * SECRET_BYTES}}}$")]
    port: Annotated[int, Field(ge=0, lt=1 << 16)]  # at which its members dial it; 0: any
    members: Annotated[list[PublicKey], Field(max_length=MAX_MEMBERS)]  # besides the lead

    @classmethod
    def load(cls, folder: Path) -> "CrewRecord":
        """Return the record of a run's folder; a new one where there is none."""
        try:
            return cls.model_validate_json((folder / RECORD_FILE).read_bytes())
        except (OSError, ValidationError):
            return cls(secret=secrets.token_hex(SECRET_BYTES), port=0, members=[])

    def save(self, folder: Path) -> None:
        """Store the record, for this machine's owner alone."""
        write_atomically(folder / RECORD_FILE, self.model_dump_json().encode(), private=True)


def _parse_body(body: bytes) -> CrewCode:
    """Return the code of a body without its version.

    Raises:
        ValueError, IndexError: it is malformed.
    """
    run, rest = str(uuid.UUID(bytes=body[:_RUN_BYTES])), body[_RUN_BYTES:]
    lead = require_sound_key(rest[:_KEY_BYTES].hex())
    secret, rest = rest[_KEY_BYTES : _KEY_BYTES + SECRET_BYTES], rest[_KEY_BYTES + SECRET_BYTES :]
    if len(secret) != SECRET_BYTES:
        raise ValueError("the secret is cut")
    addresses: list[str] = []
    while rest:
        size = rest[0]
        address, rest = rest[1 : 1 + size].decode("ascii"), rest[1 + size :]
        if len(address) != size or not address:
            raise ValueError("an address is cut")
        addresses.append(address)
    if len(addresses) > MAX_CODE_ADDRESSES:
        raise ValueError("too many addresses")
    return CrewCode(run, lead, tuple(addresses), secret)


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:_CHECKSUM_BYTES]
