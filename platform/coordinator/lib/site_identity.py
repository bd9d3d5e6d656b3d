"""Hold this site's key: audience of requests, and signer of tickets, directives and times."""

import time
from functools import lru_cache

from blake3 import blake3
from django.conf import settings
from filelock import FileLock

from barnraise.protocol.coordinator_messages import MirrorView, ServerTime
from barnraise.protocol.messages import PROTOCOL_VERSION, Signed
from barnraise.protocol.signing import Identity


@lru_cache(maxsize=1)
def identity() -> Identity:
    """Return this site's key, created on first use.

    A lock guards it, because the site and its tasks start at the same time.
    """
    settings.STATE_DIR.mkdir(parents=True, exist_ok=True)
    with FileLock(settings.STATE_DIR / "mirror.lock"):
        return Identity.load_or_create(settings.STATE_DIR / "mirror.key")


def mirror_view() -> MirrorView:
    """Describe this site as its API does."""
    return MirrorView(
        key=identity().key,
        name=settings.MIRROR_NAME,
        protocols=[PROTOCOL_VERSION],
        time=time.time(),
    )


def signed_time() -> Signed:
    """Return this site's time, signed."""
    return identity().sign("time", ServerTime(mirror=identity().key, time=time.time()))


def volunteer_salt() -> bytes:
    """Return the salt that this site alone would use (see `replication.volunteer_salt`)."""
    return blake3(identity().secret, derive_key_context="barnraise 2026 volunteer salt").digest()
