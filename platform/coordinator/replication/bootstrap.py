"""A new mirror begins: the list and all logs from any one other, whoever that is. Begun again it goes on from where it
stopped: what was taken is whole."""

from collections.abc import Callable

from barnraise.errors import ListError
from barnraise.protocol.mirror_list import MirrorList, read
from coordinator.eventlog import ingest
from coordinator.eventlog.writer import resume
from coordinator.lib import site_identity
from coordinator.lib.exceptions import Refused
from coordinator.replication import mirror_list, pull
from coordinator.replication.client import Peer, Unheard
from coordinator.replication.prefetch import reader


def join(
    url: str, sure: Callable[[MirrorList, str], bool], say: Callable[[str], None]
) -> pull.Pulled:
    """Takes over all that the mirror at `url` has. The first list is believed on the word of a person: `sure` is asked
    with what it says and its digest. Raises Refused with a sentence."""
    try:
        with Peer(url) as stranger:
            view = stranger.meet()
            told = stranger.lists(mirror_list.named()[0]).lists
        _believe(url, told, sure)
        found = mirror_list.newest()
        assert found is not None
        listed, own = found.named(view.key), found.named(site_identity.identity().key)
        if listed is None or listed.expelled:
            raise Refused(
                f"{url} is the mirror {view.key[:8]}, which is not of list {found.version}"
            )
        if own is None or own.expelled:
            raise Refused(
                f"list {found.version} does not name this site: have it added with --key {site_identity.identity().key}"
            )
        done = pull.Pulled()
        with Peer(url, view.key, listed.name) as peer:
            heads = peer.heads()
            say(
                f"{sum(head.seq for head in heads.heads.values()):,} events in {len(heads.heads)} logs"
            )
            with reader() as crew:
                pull.take_logs(peer, heads, done, crew)
            resume()  # where this site lost its database and kept its key
            say(f"{done.stored:,} came; working out what they say")
            ingest.settle(later=True)
            pull.take_particulars(peer)
            ingest.settle()
            pull.take_all(peer, peer.heads(), done)  # what was new meanwhile
    except Unheard as error:
        raise Refused(error.sentence) from None
    return done


def _believe(url: str, told: list, sure: Callable[[MirrorList, str], bool]) -> None:
    if not told:
        if mirror_list.newest() is None:
            raise Refused(
                f"{url} has no mirror list: its people begin one with `manage.py mirror_list begin`"
            )
        return
    try:
        if mirror_list.newest() is not None:
            mirror_list.take(told)
            return
        digest = told[-1].digest
        if not sure(read(told[-1]), digest):
            raise Refused("nothing was taken")
        mirror_list.take(told, vouched=digest)
    except ListError as error:
        raise Refused(f"{url}: {error}") from None
