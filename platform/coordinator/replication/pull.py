"""Other mirrors' logs are pulled, each from whoever has more of it, checked, and taken page by page: what is taken is
whole and stays, what is refused changes nothing, and the next pull goes on from there."""

import logging
import random
import time
from concurrent.futures import Executor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from django.utils import timezone

from barnraise.errors import ListError
from barnraise.protocol.mirror_list import MirrorEntry
from coordinator.eventlog import ingest, private_data, projection, truncate
from coordinator.eventlog.models import ForkProof, LogEvent, Origin
from coordinator.eventlog.writer import (
    RestorePendingError,
    is_restore_pending,
    record_peer_clock,
    resume,
)
from coordinator.eventlog.writer import log_heads as our_heads
from coordinator.lib import site_identity
from coordinator.lib.exceptions import UserError
from coordinator.replication import mirror_list
from coordinator.replication.client import MirrorClient, PeerError, find_reachable
from coordinator.replication.models import PeerStatus
from coordinator.replication.prefetch import fetch_pages, prefetched
from coordinator.replication.protocol import MAX_PRIVATE_ITEMS, PROTOCOLS, LogHead, LogHeads

log = logging.getLogger("coordinator.replication")
SOONEST, LONGEST = 2.5, 120.0  # seconds between two tries of a mirror that does not answer


@dataclass
class PullResult:
    """`stored`: events that were new. `refused`: a sentence for each thing that was not taken."""

    stored: int = 0
    refused: list[str] = field(default_factory=list)


def pull_from_all(patient: bool = True) -> dict[str, PullResult]:
    """From every other mirror of the list, in any order: from the one what the other lacks. By key. `patient`: one that
    could not be used is left alone for a while, longer each time, unless it nudges (or its last try is still to come:
    that was by a clock since put right). Who was only silent is knocked at meanwhile: when a line heals nobody has to
    wait for the other's patience."""
    listed, now = mirror_list.other_mirrors(), timezone.now()
    random.shuffle(listed)
    failed = PeerStatus.objects.filter(failures__gt=0)
    resting = {
        each.key: each.silent
        for each in failed
        if patient and each.tried <= now < each.tried + retry_delay(each)
    }
    back = {each.key for each in find_reachable([each for each in listed if resting.get(each.key)])}
    return {
        each.key: pull_from(each) for each in listed if each.key not in resting or each.key in back
    }


def retry_delay(standing: PeerStatus) -> timedelta:
    """How long this one is left alone after its last try."""
    longest = min(LONGEST, SOONEST * 2 ** min(standing.failures, 16))
    return timedelta(seconds=longest * random.uniform(0.5, 1.0))


def pull_from(listed: MirrorEntry) -> PullResult:
    """One round with one mirror; what was wrong with it is noted, and logged when it is news."""
    done, now = PullResult(), timezone.now()
    said: dict[str, object] = {}
    silent = False
    try:
        with MirrorClient.for_listed(listed) as peer:
            heads = peer.fetch_heads()
            record_peer_clock(listed.key, heads.time)
            said = {
                "heard": now,
                "state": heads.state,
                "version": heads.mirrors,
                "protocols": heads.protocols,
            }
            said["heads"] = {origin: head.seq for origin, head in heads.heads.items()}
            pull_everything(peer, heads, done)
    except (PeerError, RestorePendingError) as error:
        done.refused.append(error.sentence)
        silent = isinstance(error, PeerError) and error.unreachable
    why = "; ".join(done.refused)[:300]
    before = PeerStatus.objects.filter(pk=listed.key).first() or PeerStatus(key=listed.key)
    failures = 0 if said else min(100, before.failures + 1)
    if said:
        said["apart"] = None if said["state"] == projection.state_hash() else before.apart or now
    defaults = {"tried": timezone.now(), "why": why, "failures": failures, "silent": silent, **said}
    PeerStatus.objects.update_or_create(key=listed.key, defaults=defaults)
    if why and why != before.why:
        log.warning("%s: %s", listed.name, why)
    return done


def pull_everything(peer: MirrorClient, heads: LogHeads, done: PullResult) -> None:
    """All that a mirror has more of than we do; rows last, so that each is written once. Raises PeerError."""
    try:
        pull_logs(peer, heads, done)
        if done.stored:
            ingest.project_pending(defer=True)
        pull_private_data(peer)
    finally:
        ingest.project_pending()


def pull_private_data(peer: MirrorClient) -> None:
    """Personal data that states name; rows are written by `receiving.settle`. In any order, until it has none of those
    asked for: what nobody has any more is not to stand before the rest for ever."""
    wanted = private_data.missing_digests()
    random.shuffle(wanted)
    parts = (
        wanted[start : start + MAX_PRIVATE_ITEMS]
        for start in range(0, len(wanted), MAX_PRIVATE_ITEMS)
    )
    with prefetched(map(peer.fetch_private_data, parts)) as found:
        for come in found:
            if not private_data.ingest(come, defer=True):
                break


def pull_logs(
    peer: MirrorClient, heads: LogHeads, done: PullResult, crew: Executor | None = None
) -> None:
    """Newer lists, proofs of forks, and events, which `receiving.settle` folds. `crew` reads what comes. Raises
    PeerError."""
    if heads.mirrors > mirror_list.current_version()[0]:
        try:
            mirror_list.ingest_lists(peer.fetch_lists(mirror_list.current_version()[0]).lists)
        except ListError as error:
            done.refused.append(f"{peer.name}: {error}")
    if heads.proofs > ForkProof.objects.count():
        for pair in peer.fetch_fork_evidence().proofs:
            try:
                truncate.accept_fork_proof(pair.first, pair.second)
            except UserError as error:
                done.refused.append(f"{peer.name}: {error.sentence}")
    ours = our_heads()
    own = set(Origin.objects.filter(key=site_identity.identity().key).values_list("pk", flat=True))
    if is_restore_pending():  # a restored site: what it wrote itself is back before it decides anything, or folds what others did
        refused = len(done.refused)
        for origin in own.intersection(heads.heads):
            _take(peer, origin, heads.heads[origin], ours, done, crew)
        if len(done.refused) > refused:
            return
        ingest.project_pending(defer=True)
        resume()
        ours = our_heads()
    for origin, head in sorted(
        heads.heads.items(), key=lambda item: item[0] not in own
    ):  # own first, all the same
        _take(peer, origin, head, ours, done, crew)


def _take(
    peer: MirrorClient,
    origin: str,
    head: LogHead,
    ours: dict[str, tuple[int, str]],
    done: PullResult,
    crew: Executor | None,
) -> None:
    """A log from our last event on: that one again, for where it is another the two are a proof."""
    seq, digest = ours.get(origin, (0, ""))
    if head.seq <= seq:
        if not (head.seq and (head.digest != digest if head.seq == seq else _other(origin, head))):
            return
        seq = head.seq
    after, keys = max(0, seq - 1), mirror_list.trusted_keys(origin)
    with prefetched(fetch_pages(peer, origin, after, crew)) as found:
        for page in found:
            if not page.part.events:
                if after < head.seq:
                    done.refused.append(
                        f"{peer.name} has {head.seq} events of log {origin[:8]} and shows {after}"
                    )
                return
            told = ingest.ingest_events(
                page.part.events, read=page.open_events, keys=keys, defer=True
            )
            done.stored += told.stored
            if told.rejected:
                done.refused += [f"{peer.name}: {sentence}" for sentence in told.rejected.values()]
                return
            came = Origin.objects.filter(pk=origin).values_list("head_seq", flat=True).first() or 0
            if came <= after or told.forked:  # what brings us no further is not asked for again
                return
            after = came


def _other(origin: str, head: LogHead) -> bool:
    """Whether our event of that number is another one."""
    mine = (
        LogEvent.objects.filter(origin=origin, seq=head.seq, accepted=True)
        .values_list("digest", flat=True)
        .first()
    )
    return mine is not None and mine != head.digest


def local_heads(to: str) -> LogHeads:
    """What we say to another mirror that asks how far we have come."""
    return LogHeads(
        protocols=list(PROTOCOLS),
        mirror=site_identity.identity().key,
        to=to,
        time=time.time(),
        mirrors=mirror_list.current_version()[0],
        proofs=ForkProof.objects.count(),
        state=projection.state_hash(),
        heads={
            origin: LogHead(seq=seq, digest=digest) for origin, (seq, digest) in our_heads().items()
        },
    )


def peer_summaries() -> list[dict[str, Any]]:
    """The other mirrors of the list as we last heard of them. `same`: whether they had come to our state of now; None
    where nothing was heard yet; `why`: what was wrong with the last pull."""
    ours, known = projection.state_hash(), PeerStatus.objects.in_bulk()
    found = []
    for each in mirror_list.other_mirrors():
        standing = known.get(each.key) or PeerStatus(key=each.key, tried=None)
        found.append(
            {
                "key": each.key, "name": each.name, "url": each.url, "list": standing.version,
                "heard": standing.heard and standing.heard.timestamp(), "state": standing.state,
                "same": standing.state == ours if standing.state else None, "why": standing.why,
            }
        )  # fmt: skip
    return found
