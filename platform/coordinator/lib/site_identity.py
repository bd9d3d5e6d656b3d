"""Hold this site's key: audience of requests, and signer of tickets, directives and times."""

import time
from collections.abc import Callable
from functools import lru_cache

from blake3 import blake3
from django.conf import settings
from filelock import FileLock

from barnraise.protocol.coordinator_messages import MirrorView, ServerTime
from barnraise.protocol.messages import Signed
from barnraise.protocol.signing import Identity
from barnraise.protocol.versions import SPOKEN_PROTOCOLS
from coordinator.lib.exceptions import OtherSiteError

DELIBERATE_CHANGE = "After a deliberate change run `manage.py eventlog change-owner`"
_key_lookups: list[Callable[[], str | None]] = []


def register_key_lookup(find_key: Callable[[], str | None]) -> None:
    """Register what finds the public key that the database belongs to; no other is created."""
    _key_lookups.append(find_key)


@lru_cache(maxsize=1)
def identity() -> Identity:
    """Return this site's key, created on first use if the database belongs to no key yet.

    A lock guards it, because the site and its tasks start at the same time.

    Raises:
        OtherSiteError: The database belongs to a key that is not here.
    """
    if settings.MIRROR_KEY:
        return Identity(bytes.fromhex(settings.MIRROR_KEY))
    path = settings.STATE_DIR / "mirror.key"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            for find_key in _key_lookups:
                if owner := find_key():
                    raise OtherSiteError(_describe_owner(owner, f"there is no {path}"))
        return Identity.load_or_create(path)


def check_key(owner: str) -> None:
    """Check that this site's key is `owner`.

    Raises:
        OtherSiteError: It is another.
    """
    if identity().key != owner:
        place = "BARNRAISE_MIRROR_KEY" if settings.MIRROR_KEY else settings.STATE_DIR / "mirror.key"
        raise OtherSiteError(_describe_owner(owner, f"{place} is another"))


def _describe_owner(owner: str, problem: str) -> str:
    return (
        f"this database belongs to mirror {owner[:8]}, and {problem}: copy the state folder of the "
        f"first host, or set BARNRAISE_MIRROR_KEY. {DELIBERATE_CHANGE}"
    )


def mirror_view() -> MirrorView:
    """Describe this site as its API does."""
    return MirrorView(
        key=identity().key,
        name=settings.MIRROR_NAME,
        protocols=list(SPOKEN_PROTOCOLS),
        time=time.time(),
    )


def signed_time() -> Signed:
    """Return this site's time, signed."""
    return identity().sign("time", ServerTime(mirror=identity().key, time=time.time()))


def volunteer_salt() -> bytes:
    """Return the salt that this site alone would use (see `replication.volunteer_salt`)."""
    return blake3(identity().secret, derive_key_context="barnraise 2026 volunteer salt").digest()
