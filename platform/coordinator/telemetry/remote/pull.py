"""Pull figures from the other mirrors every few seconds."""

import logging
import secrets
from typing import Any

from django.db import transaction
from django.utils import timezone
from pydantic import ValidationError

from barnraise.errors import MessageError
from barnraise.protocol.mirror_list import MirrorEntry
from barnraise.protocol.signing import digest, open_signed
from coordinator.fleet.models import Membership
from coordinator.lib import site_identity
from coordinator.replication import mirror_list, slow_mirrors
from coordinator.replication.client import PULL_SECONDS, MirrorClient, PeerError
from coordinator.replication.models import PeerStatus
from coordinator.telemetry.models import RemoteCursor, RunEvent
from coordinator.telemetry.remote import ingest
from coordinator.telemetry.remote.protocol import (
    PageSignature,
    SignedTelemetryPage,
    TelemetryPage,
    TelemetryPosition,
    TelemetryRequest,
)

log = logging.getLogger("coordinator.telemetry")

PAGES = 20  # of one mirror at a time: a new site has much to receive


def pull_all() -> int:
    """Pull new rows from every other mirror; return how many arrived."""
    others = mirror_list.other_mirrors()
    delete_delisted_mirrors({mirror.key for mirror in others})
    unreachable = set(
        PeerStatus.objects.filter(failures__gt=0).values_list("key", flat=True)
    )  # their logs cannot be had either
    return sum(pull_from(mirror) for mirror in others if mirror.key not in unreachable)


def delete_delisted_mirrors(listed_keys: set[str]) -> None:
    """Delete the rows of mirrors that are not in the mirror list."""
    for cursor in RemoteCursor.objects.exclude(key__in=listed_keys):
        with transaction.atomic():
            Membership.everywhere.filter(mirror=cursor.key).delete()
            RunEvent.objects.filter(mirror=cursor.key).delete()
            cursor.delete()


def pull_from(listed: MirrorEntry) -> int:
    """Pull from one mirror until it has nothing more, for at most `PAGES` pages.

    Returns:
        How many rows arrived; 0 while the mirror is left alone after a failure or a long wait.
    """
    cursor, _ = RemoteCursor.objects.get_or_create(key=listed.key)
    rows = 0
    why = ""
    if cursor.is_backing_off(timezone.now()) or slow_mirrors.is_resting(listed.key):
        return 0
    outcome: dict[str, Any] = {}
    unreachable = False
    peer = MirrorClient.for_listed(listed, PULL_SECONDS)
    try:
        with peer:
            for _ in range(PAGES):
                after = cursor.position
                result = ingest.store_page(listed.key, after, fetch_page(peer, after))
                rows += result.rows
                why = result.left_out and f"{listed.name} {result.left_out}"
                if not result.more:
                    break
                cursor.refresh_from_db()
        outcome = {"last_success": timezone.now(), "failures": 0}
    except PeerError as error:
        why = error.sentence[:300]
        outcome = {"failures": min(100, cursor.failures + 1)}
        unreachable = error.unreachable
    slow_mirrors.record_wait(listed.key, peer.wasted_seconds, unreachable)
    RemoteCursor.objects.filter(pk=listed.key).update(tried=timezone.now(), why=why, **outcome)
    if why and why != cursor.why:
        log.warning("%s", why)
    return rows


def fetch_page(peer: MirrorClient, after: TelemetryPosition) -> TelemetryPage:
    """Request the rows after a position.

    Raises:
        PeerError: the mirror does not answer, or not with a valid page.
    """
    wanted = TelemetryRequest(after=after, nonce=secrets.token_hex(16))
    reply = peer.request("POST", "/mirrors/telemetry", wanted, SignedTelemetryPage)
    try:
        signature = open_signed(reply.signature, "telemetry", PageSignature, peer.key)
        page = TelemetryPage.model_validate_json(reply.text)
    except MessageError as error:
        raise PeerError(f"{peer.name}: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))[:60] or "it"
        raise PeerError(
            f"{peer.name}: its page of telemetry is malformed: {where}: {first['msg'][:100]}"
        ) from None
    if signature != PageSignature(
        mirror=peer.key,
        to=site_identity.identity().key,
        nonce=wanted.nonce,
        digest=digest(reply.text),
    ):
        raise PeerError(f"{peer.name} answered with a page that is not for this request")
    return page
