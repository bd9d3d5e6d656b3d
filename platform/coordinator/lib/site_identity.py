"""This site's own key: the audience of requests and the signer of tickets, directives and times."""

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
    settings.STATE_DIR.mkdir(parents=True, exist_ok=True)
    with FileLock(
        settings.STATE_DIR / "mirror.lock"
    ):  # site and tasks start at once, and must not make a key each
        return Identity.load_or_create(settings.STATE_DIR / "mirror.key")


def view() -> MirrorView:
    return MirrorView(
        key=identity().key,
        name=settings.MIRROR_NAME,
        protocols=[PROTOCOL_VERSION],
        time=time.time(),
    )


def signed_time() -> Signed:
    return identity().sign("time", ServerTime(mirror=identity().key, time=time.time()))


def salt() -> bytes:
    """What this mirror alone would tell people apart by (see `mirrors.salt`)."""
    return blake3(identity().secret, derive_key_context="barnraise 2026 volunteer salt").digest()
