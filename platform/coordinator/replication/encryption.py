"""Personal data on its way between two mirrors: sealed to a key that the asking one drew for this one answer, so that
neither a proxy in between nor who takes a key later can read it."""

import secrets

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from pydantic import ValidationError

from barnraise.errors import MessageError
from coordinator.eventlog import private_data
from coordinator.replication.protocol import (
    PAGE_BYTES,
    EncryptedPrivateData,
    PrivateDataRequest,
    PrivateItem,
    PrivateItems,
)

CONTEXT = "barnraise 2026 particulars between mirrors"


class RequestKey:
    """One question's key. `key` goes with it; `open` reads the answer."""

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.key = self._private.public_key().public_bytes_raw().hex()

    def decrypt(self, sealed: EncryptedPrivateData) -> list[private_data.PrivateRecord]:
        """Raises MessageError for what was not sealed for this question."""
        try:
            cipher = _cipher(self._private, sealed.key, self.key, sealed.key)
            text = cipher.decrypt(bytes.fromhex(sealed.nonce), bytes.fromhex(sealed.text), None)
            found = PrivateItems.model_validate_json(text).particulars
        except (InvalidTag, ValueError, ValidationError):
            raise MessageError(
                "what was sealed cannot be opened: it was made for another question"
            ) from None
        return [private_data.PrivateRecord(each.digest, each.salt, each.body) for each in found]


def encrypt_private_data(wants: PrivateDataRequest) -> EncryptedPrivateData:
    """What is here of what was asked for, as much as one answer holds."""
    some, size = [], 0
    for each in private_data.export(wants.digests):
        size += len(each.body.encode())
        if some and size > PAGE_BYTES:
            break
        some.append(PrivateItem(digest=each.digest, salt=each.salt, body=each.body))
    private, nonce = X25519PrivateKey.generate(), secrets.token_bytes(12)
    key = private.public_key().public_bytes_raw().hex()
    text = PrivateItems(particulars=some).model_dump_json().encode()
    try:
        cipher = _cipher(private, wants.key, wants.key, key)
    except ValueError:
        raise MessageError("the key to seal for is none") from None
    return EncryptedPrivateData(
        key=key, nonce=nonce.hex(), text=cipher.encrypt(nonce, text, None).hex()
    )


def _cipher(private: X25519PrivateKey, other: str, asking: str, answering: str) -> ChaCha20Poly1305:
    shared = private.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(other)))
    both = shared + bytes.fromhex(asking) + bytes.fromhex(answering)
    return ChaCha20Poly1305(blake3(both, derive_key_context=CONTEXT).digest())
