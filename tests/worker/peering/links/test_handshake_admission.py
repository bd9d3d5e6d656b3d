"""Whom a handshake admits, with neither a server nor a ledger."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from helpers.effort import examples
from helpers.network.handshakes import (
    EXPELLED_MIRROR,
    MIRROR,
    MIRRORS,
    NOW,
    OTHER_MIRROR,
    SPEC_DIGEST,
    create_handshake,
    sign_directive,
)
from helpers.network.transport_pairs import IDENTITIES, create_transports
from helpers.updates.tickets import RUN, sign_ticket
from hypothesis import given, settings

from barnraise.errors import MessageError, TicketError
from barnraise.peering.limits.timeouts import TIMEOUTS
from barnraise.peering.links import handshake
from barnraise.peering.links.handshake import SIMULTANEOUS_SECONDS
from barnraise.peering.transports.framing import pack
from barnraise.peering.transports.transport import ChannelClosedError
from barnraise.protocol.messages import BlobPart, BlobRequest, Goodbye, Peer, Signed
from barnraise.protocol.signing import ORPHANED_TICKET_GRACE_SECONDS, TICKET_GRACE_SECONDS, Identity

ADA, BEN, _ = IDENTITIES
OTHER_RUN = "01890000-0000-7000-8000-00000000000f"
STRANGER = Identity(b"s" * 32)
AGES = [-1e6] + [  # seconds since a ticket expired
    grace + seconds
    for grace in (0.0, TICKET_GRACE_SECONDS, ORPHANED_TICKET_GRACE_SECONDS)
    for seconds in (-1.0, 1.0)
]


async def open_ends():
    """Return a new channel's two ends: Ada's, who dialled, and Ben's."""
    a, b = create_transports("memory")
    for transport in (a, b):
        await transport.start()
    dialled = await a.connect(Peer(key=b.key, addresses=b.addresses()))
    return dialled, await b.accept()


async def test_two_machines_of_a_run_admit_each_other():
    dialled, accepted = await open_ends()
    ada, ben = await asyncio.gather(
        create_handshake(ADA, volunteer="a" * 64).greet(dialled, dialled=True),
        create_handshake(BEN, volunteer="b" * 64).greet(accepted, dialled=False),
    )
    assert (ada.key, ada.ticket.volunteer, ada.dialled) == (BEN.key, "b" * 64, True)
    assert (ben.key, ben.ticket.volunteer, ben.dialled) == (ADA.key, "a" * 64, False)
    assert ben.stated_addresses == {"192.0.2.1:4000"} and ben.hello.spec == SPEC_DIGEST


@pytest.mark.parametrize(
    ("frame", "error", "reason"),
    [
        (b"garbage", MessageError, "a frame"),
        (pack(BlobRequest(digest="a" * 64)), MessageError, "before hello"),
        (pack(BlobPart(digest="a" * 64, offset=0, total=1), b"x"), MessageError, "before hello"),
        (pack(Goodbye(reason="too many")), ChannelClosedError, "too many"),
        (None, ChannelClosedError, "it hung up"),
        (b"", TimeoutError, None),
    ],
    ids=["garbage", "a request", "a payload", "goodbye", "closed", "silence"],
)
async def test_peer_that_sends_no_hello_first_is_not_admitted(frame, error, reason, monkeypatch):
    monkeypatch.setattr(handshake, "TIMEOUTS", replace(TIMEOUTS, hello_seconds=0.5))
    dialled, accepted = await open_ends()
    if frame:
        await dialled.send(frame)
    elif frame is None:
        dialled.close("it hung up")
    with pytest.raises(error, match=reason):
        await asyncio.wait_for(create_handshake(BEN).greet(accepted, dialled=False), 9.0)


@settings(max_examples=examples(100, 1000), deadline=None)
@given(
    mirror=st.sampled_from([MIRROR, MIRROR, OTHER_MIRROR, EXPELLED_MIRROR, STRANGER]),
    names=st.sampled_from(
        [(RUN, ADA.key), (RUN, ADA.key), (OTHER_RUN, ADA.key), (RUN, STRANGER.key)]
    ),
    age=st.sampled_from(AGES),
    revokers=st.sets(st.sampled_from([MIRROR, OTHER_MIRROR, EXPELLED_MIRROR]), max_size=1),
    excluded=st.sampled_from(["", "", "", ADA.key, "7" * 64]),
    orphaned=st.booleans(),
)
def test_ticket_is_valid_exactly_if_nothing_speaks_against_it(
    mirror, names, age, revokers, excluded, orphaned
):
    handshake = create_handshake(BEN, is_excluded=lambda *names: excluded in names)
    handshake.set_orphaned(orphaned)
    for revoker in revokers:
        assert handshake.revoke(sign_directive(revoker, ADA.key)) == (revoker != EXPELLED_MIRROR)
    run, peer = names
    ticket = sign_ticket(mirror, peer, run=run, expires=NOW - age, volunteer="7" * 64)
    grace = ORPHANED_TICKET_GRACE_SECONDS if orphaned else TICKET_GRACE_SECONDS
    is_valid = (
        mirror in (MIRROR, OTHER_MIRROR)
        and (run, peer) == (RUN, ADA.key)
        and age <= grace
        and mirror not in revokers
        and not excluded
    )
    if is_valid:
        assert handshake.check_ticket(ADA.key, ticket).volunteer == "7" * 64
    else:
        with pytest.raises(TicketError):
            handshake.check_ticket(ADA.key, ticket)


@settings(max_examples=examples(50, 500), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([MIRROR, OTHER_MIRROR, EXPELLED_MIRROR]),
            st.sets(st.sampled_from([ADA.key, BEN.key])),
            st.integers(0, 5),
        ),
        max_size=8,
    )
)
def test_newest_directive_of_a_mirror_counts_however_late_others_come(directives):
    handshake = create_handshake(BEN)
    newest: dict[Identity, tuple[int, set[str], Signed]] = {}
    for mirror, keys, number in directives:
        directive = sign_directive(mirror, *sorted(keys), issued=NOW + number)
        last_number, last_keys, _ = newest.get(mirror, (-1, set[str](), directive))
        counts = mirror != EXPELLED_MIRROR and number > last_number
        assert handshake.revoke(directive) == (counts and keys != last_keys), "what is relayed"
        assert not handshake.revoke(directive), "it is here already"
        if counts:
            newest[mirror] = number, keys, directive
        for other in (MIRROR, OTHER_MIRROR, EXPELLED_MIRROR):
            _, revoked, _ = newest.get(other, (0, set[str](), directive))
            for key in (ADA.key, BEN.key):
                assert handshake.is_revoked(key, other.key) == (key in revoked)
    assert handshake.current_directives() == [signed for _, _, signed in newest.values()]


@pytest.mark.parametrize(
    "directive",
    [
        sign_directive(STRANGER, ADA.key),
        sign_directive(MIRROR, ADA.key, run=OTHER_RUN),
        sign_ticket(MIRROR, ADA.key),
    ],
)
def test_directive_that_is_not_of_a_mirror_of_the_run_is_refused(directive):
    handshake = create_handshake(BEN)
    with pytest.raises(MessageError):
        handshake.revoke(directive)
    assert handshake.current_directives() == []


def test_directive_of_a_mirror_that_was_expelled_later_revokes_nothing():
    handshake = create_handshake(BEN)
    assert handshake.revoke(sign_directive(MIRROR, ADA.key))
    handshake.set_mirrors(replace(MIRRORS, expelled=frozenset([MIRROR.key])))
    assert not handshake.is_revoked(ADA.key, MIRROR.key)
    assert handshake.current_directives() == []


@given(st.floats(0.0, 100.0), st.booleans(), st.booleans())
def test_both_sides_prefer_the_same_of_two_connections(seconds, first_is_adas, second_is_adas):
    """Name each connection by who dialled it; both sides see them in this order."""
    is_old_preferred = []
    for own, peer in ((ADA, BEN), (BEN, ADA)):
        old, new = (
            SimpleNamespace(key=peer.key, connected_at=at, dialled=is_adas == (own is ADA))
            for at, is_adas in ((10.0, first_is_adas), (10.0 + seconds, second_is_adas))
        )
        is_old_preferred.append(create_handshake(own).is_preferred(old, new))
    assert is_old_preferred[0] == is_old_preferred[1]
    at_once = seconds < SIMULTANEOUS_SECONDS and first_is_adas != second_is_adas
    assert is_old_preferred[0] == (at_once and first_is_adas == (ADA.key < BEN.key))
