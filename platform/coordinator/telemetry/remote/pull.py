"""Other mirrors are asked, every few seconds, what is new of the machines that report to them."""

import logging
import secrets

from django.db import transaction
from django.utils import timezone
from pydantic import ValidationError

from barnraise.errors import MessageError
from barnraise.protocol.mirror_list import MirrorEntry
from barnraise.protocol.signing import digest, open_signed
from coordinator.fleet.models import Membership
from coordinator.lib import site_identity
from coordinator.replication import mirror_list
from coordinator.replication.client import MirrorClient, PeerError
from coordinator.replication.models import PeerStatus
from coordinator.telemetry.events import RunEvent
from coordinator.telemetry.remote import ingest
from coordinator.telemetry.remote.cursor import RemoteCursor
from coordinator.telemetry.remote.protocol import (
    PageSignature,
    SignedTelemetryPage,
    TelemetryPage,
    TelemetryPosition,
    TelemetryRequest,
)

log = logging.getLogger("coordinator.telemetry")

PAGES = 20  # taken of one mirror in one go: a new site has much to hear


def pull_all() -> int:
    """From every other mirror what is new there. How many rows came."""
    others = mirror_list.other_mirrors()
    delete_delisted_mirrors({each.key for each in others})
    gone = set(
        PeerStatus.objects.filter(failures__gt=0).values_list("key", flat=True)
    )  # their logs cannot be had either
    return sum(pull_from(each) for each in others if each.key not in gone)


def delete_delisted_mirrors(believed: set[str]) -> None:
    """Whatever mirrors told that are not of the list any more."""
    for ear in RemoteCursor.objects.exclude(key__in=believed):
        with transaction.atomic():
            Membership.everywhere.filter(mirror=ear.key).delete()
            RunEvent.objects.filter(mirror=ear.key).delete()
            ear.delete()


def pull_from(listed: MirrorEntry) -> int:
    """To one mirror, unless it is left alone just now: until there is nothing more, or it was enough for once. How many
    rows came."""
    ear, came, why = RemoteCursor.objects.get_or_create(key=listed.key)[0], 0, ""
    if ear.is_backing_off(timezone.now()):
        return 0
    said: dict[str, object] = {}
    try:
        with MirrorClient.for_listed(listed) as peer:
            for _ in range(PAGES):
                after = ear.position
                taken = ingest.store_page(listed.key, after, fetch_page(peer, after))
                came += taken.rows
                why = taken.left_out and f"{listed.name} {taken.left_out}"
                if not taken.more:
                    break
                ear.refresh_from_db()
        said = {"heard": timezone.now(), "failures": 0}
    except PeerError as error:
        why, said = error.sentence[:300], {"failures": min(100, ear.failures + 1)}
    RemoteCursor.objects.filter(pk=listed.key).update(tried=timezone.now(), why=why, **said)
    if why and why != ear.why:
        log.warning("%s", why)
    return came


def fetch_page(peer: MirrorClient, after: TelemetryPosition) -> TelemetryPage:
    """What it has past a place. Raises PeerError."""
    wanted = TelemetryRequest(after=after, nonce=secrets.token_hex(16))
    page = peer.request("POST", "/mirrors/news", wanted, SignedTelemetryPage)
    try:
        word = open_signed(page.word, "news", PageSignature, peer.key)
        news = TelemetryPage.model_validate_json(page.text)
    except MessageError as error:
        raise PeerError(f"{peer.name}: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))[:60] or "it"
        raise PeerError(
            f"{peer.name}: its news is malformed: {where}: {first['msg'][:100]}"
        ) from None
    if word != PageSignature(
        mirror=peer.key,
        to=site_identity.identity().key,
        nonce=wanted.nonce,
        digest=digest(page.text),
    ):
        raise PeerError(f"{peer.name} answered with news that is not for this request")
    return news
