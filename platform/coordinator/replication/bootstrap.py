"""Bootstrap a new mirror: fetch the mirror list and all logs from any other one.

A bootstrap that was interrupted continues when it is started again: what is stored is complete.
"""

from collections.abc import Callable

from barnraise.errors import MirrorListError
from barnraise.protocol.mirror_list import MirrorEntry, MirrorList, SignedMirrorList, parse_list
from coordinator.eventlog import ingest
from coordinator.lib import site_identity
from coordinator.lib.exceptions import UserError
from coordinator.replication import mirror_list, pull
from coordinator.replication.client import MirrorClient, PeerError
from coordinator.replication.prefetch import signature_checker


def join(
    url: str,
    confirm: Callable[[MirrorList, str], bool],
    report: Callable[[str], None],
) -> pull.PullResult:
    """Fetch all that the mirror at `url` has.

    Args:
        url: Address of any mirror.
        confirm: Asks a person whether to trust the first list, given its content and its digest.
        report: Receives lines about the progress.

    Raises:
        UserError: The mirror cannot be used, or the list does not name both sites.
    """
    try:
        with MirrorClient(url) as stranger:
            view = stranger.fetch_view()
            lists = stranger.fetch_lists(mirror_list.current_version()[0]).lists
        _ingest_lists(url, lists, confirm)
        entry = _find_entry(url, view.key)
        result = pull.PullResult()
        with MirrorClient(url, view.key, entry.name) as client:
            _pull_all(client, result, report)
    except PeerError as error:
        raise UserError(error.sentence) from None
    return result


def _ingest_lists(
    url: str, lists: list[SignedMirrorList], confirm: Callable[[MirrorList, str], bool]
) -> None:
    has_list = mirror_list.newest_list() is not None
    if not lists:
        if not has_list:
            raise UserError(
                f"{url} has no mirror list: its operators create one with "
                "`manage.py mirror_list begin`"
            )
        return
    try:
        if has_list:
            mirror_list.ingest_lists(lists)
            return
        digest = lists[-1].digest
        if not confirm(parse_list(lists[-1]), digest):
            raise UserError("nothing was taken over")
        mirror_list.ingest_lists(lists, vouched=digest)
    except MirrorListError as error:
        raise UserError(f"{url}: {error}") from None


def _find_entry(url: str, key: str) -> MirrorEntry:
    """Return the list's entry of the other mirror; both sites must be active mirrors of it."""
    newest = mirror_list.newest_list()
    assert newest is not None
    entry = newest.find(key)
    if entry is None or entry.expelled:
        raise UserError(f"{url} is the mirror {key[:8]}, which is not of list {newest.version}")
    own_key = site_identity.identity().key
    own_entry = newest.find(own_key)
    if own_entry is None or own_entry.expelled:
        raise UserError(
            f"list {newest.version} does not name this site: have it added with --key {own_key}"
        )
    return entry


def _pull_all(client: MirrorClient, result: pull.PullResult, report: Callable[[str], None]) -> None:
    heads = client.fetch_heads()
    total = sum(head.seq for head in heads.heads.values())
    report(f"{total:,} events in {len(heads.heads)} logs")
    with signature_checker() as executor:
        pull.pull_logs(client, heads, result, executor)
    report(f"stored {result.stored:,} events; computing the state")
    ingest.project_pending(defer=True)
    pull.pull_private_data(client)
    ingest.project_pending()
    pull.pull_everything(client, client.fetch_heads(), result)  # what was recorded meanwhile
