"""Pull other mirrors' logs, each log from any mirror that has more of it.

Events are verified and stored page by page. What is stored is complete and remains, what is
rejected changes nothing, and the next pull continues from there.
"""

import logging
import math
import random
import time
from collections.abc import Container, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from django.utils import timezone

from barnraise.errors import MirrorListError
from barnraise.formats import format_bytes
from barnraise.protocol.mirror_list import MirrorEntry
from coordinator.eventlog import ingest, private_data, projection, truncate
from coordinator.eventlog.models import ForkProof, LogEvent, Origin
from coordinator.eventlog.writer import is_restore_pending, log_heads, record_peer_clock, resume
from coordinator.lib import site_identity
from coordinator.lib.exceptions import RestorePendingError, UserError
from coordinator.replication import log_limits, mirror_list, slow_mirrors
from coordinator.replication.client import (
    PULL_SECONDS,
    MirrorClient,
    PeerError,
    find_reachable,
)
from coordinator.replication.models import PeerStatus
from coordinator.replication.prefetch import LogPage, fetch_pages, prefetched
from coordinator.replication.protocol import MAX_PRIVATE_ITEMS, PROTOCOLS, LogHead, LogHeads

log = logging.getLogger("coordinator.replication")
MIN_RETRY_SECONDS = 2.5  # between two attempts at a mirror that cannot be used
MAX_RETRY_SECONDS = 120.0
MAX_ERROR_CHARS = 300


@dataclass
class PullResult:
    """Summarise a pull."""

    stored: int = 0  # events that were new
    refused: list[str] = field(default_factory=list)  # a sentence for each thing that was rejected


def pull_from_all(patient: bool = True) -> dict[str, PullResult]:
    """Pull from every other mirror of the list, in random order.

    Args:
        patient: Skip a mirror that could not be used for a while, longer after each failure. A
            mirror that was only unreachable is probed at every pull, so that nobody waits for the
            retry delay once its connection is back.

    Returns:
        The results, by the mirrors' keys.
    """
    entries = mirror_list.other_mirrors()
    if patient:
        entries = [entry for entry in entries if not slow_mirrors.is_resting(entry.key)]
    most_seconds = PULL_SECONDS if patient else math.inf
    now = timezone.now()
    random.shuffle(entries)
    resting = {}  # key → whether it was unreachable
    if patient:
        for status in PeerStatus.objects.filter(failures__gt=0):
            # An attempt in the future was stamped by a clock that has been corrected since.
            if status.last_attempt <= now < status.last_attempt + retry_delay(status):
                resting[status.key] = status.unreachable
    unreachable = [entry for entry in entries if resting.get(entry.key)]
    back = {entry.key for entry in find_reachable(unreachable)}
    return {
        entry.key: pull_from(entry, most_seconds)
        for entry in entries
        if entry.key not in resting or entry.key in back
    }


def retry_delay(status: PeerStatus) -> timedelta:
    """Return how long to skip a mirror after its last attempt: exponential, with random jitter."""
    longest = min(MAX_RETRY_SECONDS, MIN_RETRY_SECONDS * 2 ** min(status.failures, 16))
    return timedelta(seconds=longest * random.uniform(0.5, 1.0))


def pull_from(entry: MirrorEntry, most_seconds: float = math.inf) -> PullResult:
    """Pull from one mirror once and store its status; log an error that is new.

    Args:
        entry: The mirror.
        most_seconds: For which it may keep this site waiting.
    """
    result = PullResult()
    started = timezone.now()
    observed: dict[str, object] = {}
    unreachable = False
    client = MirrorClient.for_listed(entry, most_seconds)
    try:
        with client:
            asked = time.monotonic()
            heads = client.fetch_heads()
            record_peer_clock(entry.key, heads.time, time.monotonic() - asked)
            observed = {
                "last_seen": started,
                "state_hash": heads.state,
                "list_version": heads.mirrors,
                "protocols": heads.protocols,
                "heads": {origin: head.seq for origin, head in heads.heads.items()},
            }
            pull_everything(client, heads, result)
    except (PeerError, RestorePendingError) as error:
        result.refused.append(error.sentence)
        unreachable = isinstance(error, PeerError) and error.unreachable
    if client.is_limited:
        slow_mirrors.record_wait(entry.key, client.wasted_seconds, unreachable)
    problem = "; ".join(result.refused)[:MAX_ERROR_CHARS]
    before = PeerStatus.objects.filter(pk=entry.key).first() or PeerStatus(key=entry.key)
    failures = min(100, before.failures + 1)
    if observed:
        failures = 0
        in_sync = observed["state_hash"] == projection.state_hash()
        observed["diverged_since"] = None if in_sync else before.diverged_since or started
    status = {
        "last_attempt": timezone.now(),
        "last_error": problem,
        "failures": failures,
        "unreachable": unreachable,
        **observed,
    }
    PeerStatus.objects.update_or_create(key=entry.key, defaults=status)
    if problem and problem != before.last_error:
        log.warning("%s: %s", entry.name, problem)
    return result


def pull_everything(client: MirrorClient, heads: LogHeads, result: PullResult) -> None:
    """Pull all that a mirror has more of; write rows last, so that each is written once.

    Raises:
        PeerError: The mirror does not answer, or not as a mirror does.
    """
    try:
        pull_logs(client, heads, result)
        if result.stored:
            ingest.project_pending(defer=True)
        pull_private_data(client)
    finally:
        ingest.project_pending()


def pull_private_data(client: MirrorClient) -> None:
    """Pull private data that states name; `ingest.project_pending` writes the rows.

    In random order, until the mirror has none of what was requested: texts that no mirror has any
    more must not block the others for ever.
    """
    digests = private_data.missing_digests()
    random.shuffle(digests)
    batches = (
        digests[start : start + MAX_PRIVATE_ITEMS]
        for start in range(0, len(digests), MAX_PRIVATE_ITEMS)
    )
    with prefetched(map(client.fetch_private_data, batches)) as answers:
        for records in answers:
            if not private_data.ingest(records, defer=True):
                break


def pull_logs(
    client: MirrorClient, heads: LogHeads, result: PullResult, executor: Executor | None = None
) -> None:
    """Pull newer mirror lists, proofs of forks, and events, which `ingest.project_pending` folds.

    An executor verifies the signatures elsewhere.

    Raises:
        PeerError: The mirror does not answer, or not as a mirror does.
    """
    _pull_mirror_list(client, heads, result)
    _pull_fork_evidence(client, heads, result)
    own = set(Origin.objects.filter(key=site_identity.identity().key).values_list("pk", flat=True))
    if is_restore_pending() and not _recover_own_logs(client, heads, own, result, executor):
        return
    local_heads = log_heads()
    own_first = sorted(heads.heads, key=lambda origin: origin not in own)
    for origin in own_first:
        local = local_heads.get(origin)
        _pull_log(client, origin, heads.heads[origin], local, result, executor)


def _pull_mirror_list(client: MirrorClient, heads: LogHeads, result: PullResult) -> None:
    version = mirror_list.current_version()[0]
    if heads.mirrors <= version:
        return
    try:
        mirror_list.ingest_lists(client.fetch_lists(version).lists)
    except MirrorListError as error:
        result.refused.append(f"{client.name}: {error}")


def _pull_fork_evidence(client: MirrorClient, heads: LogHeads, result: PullResult) -> None:
    if heads.proofs <= ForkProof.objects.count():
        return
    for evidence in client.fetch_fork_evidence().proofs:
        try:
            truncate.accept_fork_proof(evidence.first, evidence.second)
        except UserError as error:
            result.refused.append(f"{client.name}: {error.sentence}")


def _recover_own_logs(
    client: MirrorClient,
    heads: LogHeads,
    own: set[str],
    result: PullResult,
    executor: Executor | None,
) -> bool:
    """Bring a restored site's own logs back before it decides or folds anything else.

    Returns:
        Whether nothing was refused, so that the site may continue.
    """
    refused_before = len(result.refused)
    local_heads = log_heads()
    for origin in own.intersection(heads.heads):
        local = local_heads.get(origin)
        _pull_log(client, origin, heads.heads[origin], local, result, executor)
    if len(result.refused) > refused_before:
        return False
    ingest.project_pending(defer=True)
    resume()
    return True


def _pull_log(
    client: MirrorClient,
    origin: str,
    head: LogHead,
    local: tuple[int, str] | None,
    result: PullResult,
    executor: Executor | None,
) -> None:
    """Pull one log, from our last event on.

    That event is requested again: if the mirror's event of the same number differs, the two prove a
    fork.
    """
    seq, digest = local or (0, "")
    if head.seq <= seq:
        if not _is_fork(origin, head, seq, digest):
            return
        seq = head.seq
    after = max(0, seq - 1)
    keys = mirror_list.trusted_keys(origin)
    with prefetched(fetch_pages(client, origin, after, executor)) as pages:
        for page in pages:
            if not page.part.events:
                if after < head.seq:
                    result.refused.append(
                        f"{client.name} has {head.seq} events of log {origin[:8]} and shows {after}"
                    )
                return
            if not _ingest_page(client, page, keys, result):
                return
            stored = Origin.objects.filter(pk=origin).values_list("head_seq", flat=True).first()
            if (stored or 0) <= after:  # a page without progress is not requested again
                return
            after = stored or 0


def _is_fork(origin: str, head: LogHead, seq: int, digest: str) -> bool:
    """Return whether a head that is not ahead of ours (`seq`, `digest`) contradicts our log."""
    if head.seq == 0:
        return False
    if head.seq == seq:
        return head.digest != digest
    accepted = LogEvent.objects.filter(origin=origin, seq=head.seq, accepted=True)
    local_digest = accepted.values_list("digest", flat=True).first()
    return local_digest is not None and local_digest != head.digest


def _ingest_page(
    client: MirrorClient, page: LogPage, keys: Container[str], result: PullResult
) -> bool:
    """Store a page; return whether the log can be pulled further."""
    events = page.part.events
    if client.is_limited and not log_limits.admit(events):
        result.refused.append(
            f"{client.name}: the mirror {events[0].key[:8]} has added more than "
            f"{format_bytes(log_limits.MAX_DAILY_BYTES)} to its logs today: the rest is pulled "
            "tomorrow"
        )
        return False
    ingested = ingest.ingest_events(events, read=page.open_events, keys=keys, defer=True)
    result.stored += ingested.stored
    result.refused += [f"{client.name}: {sentence}" for sentence in ingested.rejected.values()]
    return not ingested.rejected and not ingested.forked


def local_heads(requested_by: str) -> LogHeads:
    """Describe how far this site's logs are, for the mirror with this key."""
    return LogHeads(
        protocols=list(PROTOCOLS),
        mirror=site_identity.identity().key,
        to=requested_by,
        time=time.time(),
        mirrors=mirror_list.current_version()[0],
        proofs=ForkProof.objects.count(),
        state=projection.state_hash(),
        heads={
            origin: LogHead(seq=seq, digest=digest) for origin, (seq, digest) in log_heads().items()
        },
    )


def peer_summaries() -> list[dict[str, Any]]:
    """Describe the other mirrors of the list as they last answered, for /status."""
    return list(_peer_summaries())


def _peer_summaries() -> Iterator[dict[str, Any]]:
    state_hash = projection.state_hash()
    statuses = PeerStatus.objects.in_bulk()
    for entry in mirror_list.other_mirrors():
        status = statuses.get(entry.key) or PeerStatus(key=entry.key, last_attempt=None)
        yield {
            "key": entry.key,
            "name": entry.name,
            "url": entry.url,
            "list": status.list_version,
            "last_seen": status.last_seen and status.last_seen.timestamp(),
            "state": status.state_hash,
            "in_sync": status.state_hash == state_hash if status.state_hash else None,
            "last_error": status.last_error,
        }
