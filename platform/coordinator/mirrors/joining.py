"""A new mirror begins: the list and all logs from any one other, whoever that is. Begun again it goes on from where it
stopped: what was taken is whole."""

from collections.abc import Callable

from barnraise.errors import ListError
from barnraise.protocol.mirror_list import MirrorList, read
from coordinator import mirror
from coordinator.mirrors import lists, pulling, receiving
from coordinator.mirrors.log import resume
from coordinator.mirrors.paging import reader
from coordinator.mirrors.peer import Peer, Unheard
from coordinator.refusals import Refused


def join(
    url: str, sure: Callable[[MirrorList, str], bool], say: Callable[[str], None]
) -> pulling.Pulled:
    """Takes over all that the mirror at `url` has. The first list is believed on the word of a person: `sure` is asked
    with what it says and its digest. Raises Refused with a sentence."""
    try:
        with Peer(url) as stranger:
            view = stranger.meet()
            told = stranger.lists(lists.named()[0]).lists
        _believe(url, told, sure)
        found = lists.newest()
        assert found is not None
        listed, own = found.named(view.key), found.named(mirror.identity().key)
        if listed is None or listed.expelled:
            raise Refused(
                f"{url} is the mirror {view.key[:8]}, which is not of list {found.version}"
            )
        if own is None or own.expelled:
            raise Refused(
                f"list {found.version} does not name this site: have it added with --key {mirror.identity().key}"
            )
        done = pulling.Pulled()
        with Peer(url, view.key, listed.name) as peer:
            heads = peer.heads()
            say(
                f"{sum(head.seq for head in heads.heads.values()):,} events in {len(heads.heads)} logs"
            )
            with reader() as crew:
                pulling.take_logs(peer, heads, done, crew)
            resume()  # where this site lost its database and kept its key
            say(f"{done.stored:,} came; working out what they say")
            receiving.settle(later=True)
            pulling.take_particulars(peer)
            receiving.settle()
            pulling.take_all(peer, peer.heads(), done)  # what was new meanwhile
    except Unheard as error:
        raise Refused(error.sentence) from None
    return done


def _believe(url: str, told: list, sure: Callable[[MirrorList, str], bool]) -> None:
    if not told:
        if lists.newest() is None:
            raise Refused(
                f"{url} has no mirror list: its people begin one with `manage.py mirrors begin`"
            )
        return
    try:
        if lists.newest() is not None:
            lists.take(told)
            return
        digest = told[-1].digest
        if not sure(read(told[-1]), digest):
            raise Refused("nothing was taken")
        lists.take(told, vouched=digest)
    except ListError as error:
        raise Refused(f"{url}: {error}") from None
