"""Store the mirror list: which other sites this one trusts, and up to which event."""

import time
from collections.abc import Collection, Sequence
from functools import partial

from django.db import transaction
from django.dispatch import Signal

from barnraise.errors import MirrorListError
from barnraise.protocol.mirror_list import (
    MirrorEntry,
    MirrorList,
    SignedMirrorList,
    lists_after,
    merge_chain,
    parse_list,
    quorum,
)
from coordinator.audit.log import record as audit
from coordinator.eventlog import writer
from coordinator.eventlog.models import Origin
from coordinator.eventlog.truncate import truncate_log
from coordinator.lib import site_identity
from coordinator.lib.exceptions import UserError
from coordinator.lib.ttl_cache import TtlCache
from coordinator.replication.models import MirrorListVersion
from coordinator.replication.volunteer_salt import ensure_salt

list_changed = Signal()  # sent in the transaction that puts another list into force
NEWEST = "newest"
# Every directive names the version, without a query for each. Another process may receive a newer
# list; this one notices it after this many seconds.
VERSION_CACHE_SECONDS = 2.0
_version_cache: TtlCache[str, tuple[int, str | None]] = TtlCache(VERSION_CACHE_SECONDS)
_relays_cache: TtlCache[str, tuple[str, ...]] = TtlCache(VERSION_CACHE_SECONDS)


def signed_chain() -> list[SignedMirrorList]:
    """Return all stored versions, oldest first."""
    return [version.signed for version in MirrorListVersion.objects.all()]


def newest_list() -> MirrorList | None:
    """Return the list in force."""
    last = MirrorListVersion.objects.last()
    return parse_list(last.signed) if last else None


def relays_in_force() -> tuple[str, ...]:
    """Return the relays that the list in force names, without a query for each call."""

    def read() -> tuple[str, ...]:
        newest = newest_list()
        return tuple(newest.relays) if newest else ()

    return _relays_cache.get(NEWEST, read)


def launch_roots() -> tuple[str, ...]:
    """Return the keys of the mirrors of the list, or this site's alone if it is in none."""
    newest = newest_list()
    own_key = site_identity.identity().key
    active = sorted(entry.key for entry in newest.active) if newest else []
    return tuple(active) if own_key in active else (own_key,)


def list_of_run(roots: Collection[str]) -> MirrorList | None:
    """Return the list in force, if it is one of a run's mirrors."""
    newest = newest_list()
    return newest if newest is not None and newest.keys.intersection(roots) else None


def binds_this_site(mirrors: Collection[str]) -> bool:
    """Return whether what these mirrors decided counts here: this site is one, or half of all."""
    if not mirrors:
        return False
    if site_identity.identity().key in mirrors:
        return True
    newest = newest_list()
    active = frozenset(entry.key for entry in newest.active) if newest else frozenset()
    return bool(active) and len(active.intersection(mirrors)) >= quorum(len(active))


def other_mirrors() -> list[MirrorEntry]:
    """Return the mirrors of the list, except this one and the expelled."""
    newest = newest_list()
    own_key = site_identity.identity().key
    return [entry for entry in newest.active if entry.key != own_key] if newest else []


def lists_since(version: int) -> list[SignedMirrorList]:
    """Return the lists that a holder of `version` needs: later changes of roots, and the newest."""
    needed: list[SignedMirrorList] = []
    for signed in signed_chain():
        if len(needed) >= 2 and not _changes_roots(needed[-2], needed[-1]):
            needed.pop()
        needed.append(signed)
    return lists_after(needed, version)


def _changes_roots(before: SignedMirrorList, after: SignedMirrorList) -> bool:
    old, new = parse_list(before), parse_list(after)
    return (set(old.roots), old.threshold) != (set(new.roots), new.threshold)


def current_version() -> tuple[int, str | None]:
    """Return (version, digest) of the list in force, cached; (0, None) without a list."""
    return _version_cache.get(NEWEST, _read_version)


def _read_version() -> tuple[int, str | None]:
    last = MirrorListVersion.objects.last()
    return (last.version, last.signed.digest) if last else (0, None)


def ingest_lists(
    lists: Sequence[SignedMirrorList], vouched: str = "", now: float | None = None
) -> bool:
    """Verify and store lists, and withdraw the later events of mirrors that they expel.

    Args:
        lists: What was received.
        vouched: For the first list, the digest by which a person here knows it.
        now: Seconds since 1970, for tests.

    Returns:
        Whether the list in force changed.

    Raises:
        MirrorListError: A list is refused; nothing changes.
    """
    with transaction.atomic():
        stored = [version.signed for version in MirrorListVersion.objects.select_for_update()]
        merged = merge_chain(stored, lists, time.time() if now is None else now, vouched)
        fresh = [signed for signed in merged if signed not in stored]
        for signed in fresh:
            MirrorListVersion.objects.create(
                version=parse_list(signed).version, body=signed.body, signatures=signed.signatures
            )
        if fresh:
            _apply(parse_list(fresh[-1]))
        return bool(fresh)


def _apply(newest: MirrorList) -> None:
    """Act on a list that is in force from now on."""
    _truncate_expelled(newest)
    own_key = site_identity.identity().key
    active = {entry.key for entry in newest.active}
    if own_key in active:
        ensure_salt()
    if not active - {own_key}:
        writer.resume()  # no mirror is left that a restored site could wait for
    for cache in (_version_cache, _relays_cache):
        transaction.on_commit(partial(cache.invalidate, NEWEST))
        cache.invalidate(NEWEST)
    list_changed.send(MirrorListVersion)


def _truncate_expelled(newest: MirrorList) -> None:
    for entry in newest.mirrors:
        if entry.expelled is None:
            continue
        reason = f"{entry.name} was expelled"
        if entry.expelled.reason:
            reason += f": {entry.expelled.reason}"
        for origin_id, last_valid_seq in entry.expelled.last.items():
            # A log that is still unknown is accepted later, up to that event.
            Origin.objects.get_or_create(id=origin_id, defaults={"key": entry.key})
            truncate_log(origin_id, last_valid_seq, reason)
        others = Origin.objects.filter(key=entry.key).exclude(id__in=entry.expelled.last)
        for origin in others:
            truncate_log(origin.pk, 0, reason)


def trusted_keys(origin: str) -> frozenset[str]:
    """Return the keys whose events are accepted in this log.

    These are the mirrors of the list, and those expelled mirrors for which the list names the log.
    """
    newest = newest_list()
    if newest is None:
        return frozenset()
    return frozenset(
        entry.key
        for entry in newest.mirrors
        if entry.expelled is None or origin in entry.expelled.last
    )


def publish(signed: SignedMirrorList, *, first: bool = False) -> MirrorList:
    """Put a list into force that a person here vouches for or enough roots have signed.

    Args:
        signed: The list.
        first: It is the site's first list, trusted on the person's word.

    Raises:
        UserError: The list is refused.
    """
    try:
        if first and MirrorListVersion.objects.exists():
            raise MirrorListError("there is a mirror list here already")
        if not ingest_lists([signed], signed.digest if first else ""):
            raise MirrorListError("this list is in force already")
    except MirrorListError as error:
        raise UserError(str(error)) from None
    last = MirrorListVersion.objects.latest("version")
    newest = parse_list(last.signed)
    audit(
        "mirrors.list",
        last,
        version=newest.version,
        mirrors=len(newest.active),
        roots=newest.roots,
    )
    return newest
