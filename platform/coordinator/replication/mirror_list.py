"""The mirror list as this site holds it: which other sites it believes, and from which number on no longer."""

import time
from collections.abc import Sequence

from django.db import transaction

from barnraise.errors import ListError
from barnraise.protocol.mirror_list import (
    MirrorEntry,
    MirrorList,
    SignedMirrorList,
    lists_after,
    merge_chain,
    parse_list,
)
from coordinator.audit.log import record as audit
from coordinator.eventlog.models import Origin
from coordinator.eventlog.truncate import truncate_log
from coordinator.lib import site_identity
from coordinator.lib.exceptions import UserError
from coordinator.lib.ttl_cache import TtlCache
from coordinator.replication.models import MirrorListVersion
from coordinator.replication.volunteer_salt import ensure_salt

NEWEST, SECONDS = "newest", 2.0
_named: TtlCache[str, tuple[int, str | None]] = TtlCache(
    SECONDS
)  # what every directive names, without a query each


def signed_chain() -> list[SignedMirrorList]:
    return [each.signed for each in MirrorListVersion.objects.all()]


def newest_list() -> MirrorList | None:
    last = MirrorListVersion.objects.last()
    return parse_list(last.signed) if last else None


def other_mirrors() -> list[MirrorEntry]:
    """The mirrors of the list that are not this one."""
    found, own = newest_list(), site_identity.identity().key
    return [each for each in found.active if each.key != own] if found else []


def lists_since(after: int) -> list[SignedMirrorList]:
    """What somebody who holds version `after` is told: those that changed the roots since, and the newest."""
    kept: list[SignedMirrorList] = []
    for signed in signed_chain():
        kept = (
            [*kept, signed]
            if len(kept) < 2 or _turned(kept[-2], kept[-1])
            else [*kept[:-1], signed]
        )
    return lists_after(kept, after)


def _turned(before: SignedMirrorList, after: SignedMirrorList) -> bool:
    one, other = parse_list(before), parse_list(after)
    return (set(one.roots), one.threshold) != (set(other.roots), other.threshold)


def current_version() -> tuple[int, str | None]:
    """(version, digest) of the newest, for directives; (0, None) without one. Another process may have a newer one by
    now: this one hears of it within SECONDS."""
    return _named.get(NEWEST, _newest)


def _newest() -> tuple[int, str | None]:
    last = MirrorListVersion.objects.last()
    return (last.version, last.signed.digest) if last else (0, None)


def ingest_lists(
    lists: Sequence[SignedMirrorList], vouched: str = "", now: float | None = None
) -> bool:
    """Holds what was told from now on, and withdraws what expelled mirrors said past their last number. False: it says
    nothing new. `vouched`: of the first list, the digest by which a person here knows it. Raises ListError with the
    reason for what is refused; then nothing changes."""
    with transaction.atomic():
        held = list(MirrorListVersion.objects.select_for_update())
        before = [each.signed for each in held]
        after = merge_chain(before, lists, time.time() if now is None else now, vouched)
        fresh = [each for each in after if each not in before]
        for signed in fresh:
            MirrorListVersion.objects.create(
                version=parse_list(signed).version, body=signed.body, signatures=signed.signatures
            )
        if fresh:
            _expel(parse_list(fresh[-1]))
            if site_identity.identity().key in {each.key for each in parse_list(fresh[-1]).active}:
                ensure_salt()
            transaction.on_commit(lambda: _named.invalidate(NEWEST))
            _named.invalidate(NEWEST)
        return bool(fresh)


def _expel(found: MirrorList) -> None:
    for each in found.mirrors:
        if each.expelled is None:
            continue
        why = (
            f"{each.name} was expelled{': ' + each.expelled.reason if each.expelled.reason else ''}"
        )
        for origin, last in each.expelled.last.items():
            Origin.objects.get_or_create(
                id=origin, defaults={"key": each.key}
            )  # it may come later, up to there
            truncate_log(origin, last, why)
        for origin in Origin.objects.filter(key=each.key).exclude(id__in=each.expelled.last):
            truncate_log(origin.pk, 0, why)


def trusted_keys(origin: str) -> frozenset[str]:
    """Whose events may be in this log: mirrors of the list, and of the expelled those whose log it names."""
    found = newest_list()
    if found is None:
        return frozenset()
    return frozenset(
        each.key for each in found.mirrors if each.expelled is None or origin in each.expelled.last
    )


def publish(signed: SignedMirrorList, *, first: bool = False) -> MirrorList:
    """A person here takes a list, signed by enough roots: the first one on their own word. Raises UserError."""
    try:
        if first and MirrorListVersion.objects.exists():
            raise ListError("there is a mirror list here already")
        if not ingest_lists([signed], signed.digest if first else ""):
            raise ListError("this very list is held already")
    except ListError as error:
        raise UserError(str(error)) from None
    last = MirrorListVersion.objects.last()
    assert last is not None
    found = parse_list(last.signed)
    audit("mirrors.list", last, version=found.version, mirrors=len(found.active), roots=found.roots)
    return found
