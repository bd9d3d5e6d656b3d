"""Encrypt a machine's key for a backup, by a passphrase. Pure but for the random numbers.

The passphrase becomes a key by scrypt (RFC 7914), which takes 128 MiB of memory for each guess, and
ChaCha20-Poly1305 (RFC 8439) encrypts and authenticates with it.
"""

import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from pydantic import BaseModel, Field, ValidationError

from barnraise.errors import StateError
from barnraise.state_dir import SiteMembership

HEADER = b"barnraise key, version 1\n"
SALT_BYTES = 16
NONCE_BYTES = 12
COST, BLOCK_SIZE, PARALLELISM = 1 << 17, 8, 1  # of scrypt, as its authors advise for files
MIN_PASSPHRASE = 8  # characters
MIN_FILE_BYTES, MAX_FILE_BYTES = 150, 10_000


class KeyBackup(BaseModel):
    """What a backup holds: the private key, and the machine's enrolment if it had one."""

    secret: str = Field(pattern="^[0-9a-f]{64}$")
    membership: SiteMembership | None = None


def encrypt_backup(backup: KeyBackup, passphrase: str) -> bytes:
    """Return a backup as the bytes of a file.

    Raises:
        StateError: the passphrase is too short.
    """
    if len(passphrase) < MIN_PASSPHRASE:
        raise StateError(f"a passphrase has at least {MIN_PASSPHRASE} characters; nothing is saved")
    text = backup.model_dump_json().encode()
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
        return KeyBackup.model_validate_json(text)
    except InvalidTag:
        raise StateError(
            "the passphrase is wrong, or the file was changed or cut short; nothing is imported"
        ) from None
    except ValidationError:
        raise StateError("the file holds no key that this version of barnraise reads") from None


def check_backup(content: bytes) -> None:
    """Raise StateError for what cannot be a backup, before a passphrase is typed."""
    if not content.startswith(HEADER) or not MIN_FILE_BYTES <= len(content) <= MAX_FILE_BYTES:
        raise StateError(
            "the file is no key that `barnraise key export` wrote, or it is cut short; nothing is "
            "imported"
        )


def _derive_key(passphrase: str, salt: bytes) -> bytes:
    scrypt = Scrypt(salt=salt, length=32, n=COST, r=BLOCK_SIZE, p=PARALLELISM)
    return scrypt.derive(passphrase.encode("utf-8", errors="surrogatepass"))
