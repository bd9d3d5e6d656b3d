"""Encrypt a machine's key for a backup, by a passphrase. Pure but for the random numbers.

The passphrase becomes a key by scrypt (RFC 7914), which takes 128 MiB of memory for each guess, and
ChaCha20-Poly1305 (RFC 8439) encrypts and authenticates with it.
"""

import json
import secrets
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from pydantic import ValidationError

from barnraise.errors import StateError
from barnraise.state_dir import SiteMembership

HEADER = b"barnraise key, version 1\n"
SALT_BYTES = 16
NONCE_BYTES = 12
TAG_BYTES = 16
SECRET_BYTES = 32
COST, BLOCK_SIZE, PARALLELISM = 1 << 17, 8, 1  # of scrypt, as its authors advise for files
MIN_PASSPHRASE = 8  # characters
MAX_FILE_BYTES = 10_000


@dataclass(frozen=True)
class KeyBackup:
    """What a backup holds.

    Attributes:
        secret: the private key's 32 bytes.
        membership: the machine's enrolment; None if it had none.
    """

    secret: bytes
    membership: SiteMembership | None = None


def encrypt_backup(backup: KeyBackup, passphrase: str) -> bytes:
    """Return a backup as the bytes of a file.

    Raises:
        StateError: the passphrase is too short.
    """
    if len(passphrase) < MIN_PASSPHRASE:
        raise StateError(f"a passphrase has at least {MIN_PASSPHRASE} characters; nothing is saved")
    membership = backup.membership.model_dump(mode="json") if backup.membership else None
    text = json.dumps({"secret": backup.secret.hex(), "membership": membership}).encode()
    salt, nonce = secrets.token_bytes(SALT_BYTES), secrets.token_bytes(NONCE_BYTES)
    sealed = ChaCha20Poly1305(_derive_key(passphrase, salt)).encrypt(nonce, text, HEADER)
    return HEADER + salt + nonce + sealed


def decrypt_backup(content: bytes, passphrase: str) -> KeyBackup:
    """Return what a file holds.

    Raises:
        StateError: it is no such file, it is cut short, or the passphrase is wrong.
    """
    check_backup(content)
    body = content[len(HEADER) :]
    salt, nonce = body[:SALT_BYTES], body[SALT_BYTES : SALT_BYTES + NONCE_BYTES]
    try:
        key = _derive_key(passphrase, salt)
        text = ChaCha20Poly1305(key).decrypt(nonce, body[SALT_BYTES + NONCE_BYTES :], HEADER)
    except InvalidTag:
        raise StateError(
            "the passphrase is wrong, or the file was changed or cut short; nothing is imported"
        ) from None
    try:
        fields = json.loads(text)
        membership = fields["membership"]
        if membership is not None:
            membership = SiteMembership.model_validate(membership)
        secret = bytes.fromhex(fields["secret"])
    except (ValueError, LookupError, TypeError, ValidationError):
        secret = b""
        membership = None
    if len(secret) != SECRET_BYTES:
        raise StateError("the file holds no key that this version of barnraise reads")
    return KeyBackup(secret, membership)


def check_backup(content: bytes) -> None:
    """Refuse what cannot be a backup, before a passphrase is typed.

    Raises:
        StateError: it is no such file, or cut short.
    """
    if not content.startswith(HEADER):
        is_cut = HEADER.startswith(content)
        what = "is cut short" if is_cut else "is no key that `barnraise key export` wrote"
        raise StateError(f"the file {what}; nothing is imported")
    shortest = len(HEADER) + SALT_BYTES + NONCE_BYTES + TAG_BYTES + 2 * SECRET_BYTES
    if not shortest <= len(content) <= MAX_FILE_BYTES:
        raise StateError("the file is cut short, or is no key; nothing is imported")


def _derive_key(passphrase: str, salt: bytes) -> bytes:
    scrypt = Scrypt(salt=salt, length=32, n=COST, r=BLOCK_SIZE, p=PARALLELISM)
    return scrypt.derive(passphrase.encode("utf-8", errors="surrogatepass"))
