"""Encrypt private data between two mirrors.

The requesting mirror makes a key for each request and the answering one a key for each answer, so
neither a proxy in between nor somebody who steals a site's key later can read them.
"""

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

CONTEXT = "barnraise 2026 private data between mirrors"
NONCE_BYTES = 12


class RequestKey:
    """Hold the key of one request: `key` travels with it, and `decrypt` opens the answer."""

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.key = self._private.public_key().public_bytes_raw().hex()

    def decrypt(self, answer: EncryptedPrivateData) -> list[private_data.PrivateRecord]:
        """Decrypt an answer.

        Raises:
            MessageError: It was not encrypted for this request.
        """
        try:
            cipher = _derive_cipher(self._private, answer.key, self.key, answer.key)
            nonce = bytes.fromhex(answer.nonce)
            text = cipher.decrypt(nonce, bytes.fromhex(answer.text), None)
            items = PrivateItems.model_validate_json(text).items
        except (InvalidTag, ValueError, ValidationError):
            raise MessageError(
                "the private data cannot be decrypted: it was made for another request"
            ) from None
        return [private_data.PrivateRecord(item.digest, item.salt, item.body) for item in items]


def encrypt_private_data(request: PrivateDataRequest) -> EncryptedPrivateData:
    """Encrypt the requested data that is here, as much as one answer holds.

    Raises:
        MessageError: The request's key is no X25519 key.
    """
    items: list[PrivateItem] = []
    size = 0
    for record in private_data.export(request.digests):
        size += len(record.body.encode())
        if items and size > PAGE_BYTES:
            break
        items.append(PrivateItem(digest=record.digest, salt=record.salt, body=record.body))
    private = X25519PrivateKey.generate()
    key = private.public_key().public_bytes_raw().hex()
    nonce = secrets.token_bytes(NONCE_BYTES)
    text = PrivateItems(items=items).model_dump_json().encode()
    try:
        cipher = _derive_cipher(private, request.key, request.key, key)
    except ValueError:
        raise MessageError("the request's key is not an X25519 key") from None
    encrypted = cipher.encrypt(nonce, text, None)
    return EncryptedPrivateData(key=key, nonce=nonce.hex(), text=encrypted.hex())


def _derive_cipher(
    private: X25519PrivateKey, other: str, request_key: str, answer_key: str
) -> ChaCha20Poly1305:
    """Derive the cipher from the shared secret and both public keys."""
    shared = private.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(other)))
    material = shared + bytes.fromhex(request_key) + bytes.fromhex(answer_key)
    return ChaCha20Poly1305(blake3(material, derive_key_context=CONTEXT).digest())
