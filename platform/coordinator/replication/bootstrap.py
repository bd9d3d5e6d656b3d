"""A new mirror begins: the list and all logs from any one other, whoever that is. Begun again it goes on from where it
stopped: what was taken is whole."""

from collections.abc import Callable

from barnraise.errors import ListError
from barnraise.protocol.mirror_list import MirrorList, parse_list
from coordinator.eventlog import ingest
from coordinator.eventlog.writer import resume
from coordinator.lib import site_identity
from coordinator.lib.exceptions import UserError
from coordinator.replication import mirror_list, pull
from coordinator.replication.client import MirrorClient, PeerError
from coordinator.replication.prefetch import signature_checker


def join(
    url: str, sure: Callable[[MirrorList, str], bool], say: Callable[[str], None]
) -> pull.PullResult:
    """Takes over all that the mirror at `url` has. The first list is believed on the word of a person: `sure` is asked
    with what it says and its digest. Raises UserError with a sentence."""
    try:
        with MirrorClient(url) as stranger:
            view = stranger.fetch_view()
            told = stranger.fetch_lists(mirror_list.current_version()[0]).lists
        _believe(url, told, sure)
        found = mirror_list.newest_list()
        assert found is not None
        listed, own = found.find(view.key), found.find(site_identity.identity().key)
        if listed is None or listed.expelled:
            raise UserError(
                f"{url} is the mirror {view.key[:8]}, which is not of list {found.version}"
            )
        if own is None or own.expelled:
            raise UserError(
                f"list {found.version} does not name this site: have it added with --key {site_identity.identity().key}"
            )
        done = pull.PullResult()
        with MirrorClient(url, view.key, listed.name) as peer:
            heads = peer.fetch_heads()
            say(
                f"{sum(head.seq for head in heads.heads.values()):,} events in {len(heads.heads)} logs"
            )
            with signature_checker() as crew:
                pull.pull_logs(peer, heads, done, crew)
            resume()  # where this site lost its database and kept its key
            say(f"{done.stored:,} came; working out what they say")
            ingest.project_pending(defer=True)
            pull.pull_private_data(peer)
            ingest.project_pending()
            pull.pull_everything(peer, peer.fetch_heads(), done)  # what was new meanwhile
    except PeerError as error:
        raise UserError(error.sentence) from None
    return done


def _believe(url: str, told: list, sure: Callable[[MirrorList, str], bool]) -> None:
    if not told:
        if mirror_list.newest_list() is None:
            raise UserError(
                f"{url} has no mirror list: its people begin one with `manage.py mirror_list begin`"
            )
        return
    try:
        if mirror_list.newest_list() is not None:
            mirror_list.ingest_lists(told)
            return
        digest = told[-1].digest
        if not sure(parse_list(told[-1]), digest):
            raise UserError("nothing was taken")
        mirror_list.ingest_lists(told, vouched=digest)
    except ListError as error:
        raise UserError(f"{url}: {error}") from None
