"""Test whom a machine waits for, and what a hostile or confused neighbour can do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.errors import MessageError
from barnraise.mixing.step_inbox import (
    MAX_LEAD_STEPS,
    MAX_SPARE,
    PIECE_BYTES,
    Arrival,
    FrameKind,
    GroupArrivals,
    MixingFrame,
    StepInbox,
    roster_digest,
)

ROSTER, OTHER = roster_digest(["a", "b"]), roster_digest(["a", "b", "c"])
SIZE = PIECE_BYTES + 10


def beacon(step: int, roster: bytes = ROSTER) -> MixingFrame:
    return MixingFrame(FrameKind.BEACON, step, roster)


def pieces(step: int, roster: bytes = ROSTER) -> list[MixingFrame]:
    first, rest = bytes(PIECE_BYTES), bytes(SIZE - PIECE_BYTES)
    kind = FrameKind.WEIGHTS
    return [
        MixingFrame(kind, step, roster, SIZE, 0, first),
        MixingFrame(kind, step, roster, SIZE, len(first), rest),
    ]


@pytest.fixture
def inbox() -> StepInbox:
    box = StepInbox(SIZE)
    box.add_neighbour("b")
    return box


def test_neighbour_is_awaited_until_its_last_piece(inbox):
    assert inbox.look_up("b", 0, ROSTER) is Arrival.AWAITED
    inbox.accept("b", beacon(0))
    first, last = pieces(0)
    assert not inbox.accept("b", first), "nobody needs to wake for it"
    assert inbox.look_up("b", 0, ROSTER) is Arrival.AWAITED
    assert inbox.accept("b", last)
    inbox.accept("b", beacon(1, OTHER))
    assert inbox.look_up("b", 0, ROSTER) is Arrival.ARRIVED, "although its roster has changed since"
    assert inbox.pop_arrivals(["b"], 0, ROSTER) == GroupArrivals({"b": bytes(SIZE)}, (), False)
    assert inbox.look_up("b", 0, ROSTER) is not Arrival.ARRIVED, "its memory is free again"


def test_neighbour_elsewhere_or_gone_is_not_awaited(inbox):
    inbox.accept("b", beacon(0, OTHER))
    assert inbox.look_up("b", 0, ROSTER) is Arrival.ABSENT, "it mixes by another roster"
    inbox.accept("b", beacon(3))
    assert inbox.look_up("b", 2, ROSTER) is Arrival.ABSENT, "it has gone on"
    assert inbox.look_up("b", 3, ROSTER) is Arrival.AWAITED
    assert inbox.newest_step() == 3
    inbox.remove_neighbour("b")
    assert inbox.look_up("b", 3, ROSTER) is Arrival.ABSENT
    assert inbox.newest_step() == -1


def test_arrivals_name_who_is_late_and_whether_another_has_gone_on(inbox):
    inbox.add_neighbour("c")
    inbox.accept("c", beacon(7))
    assert not inbox.has_all(["b", "c"], 3, ROSTER) and inbox.has_all(["c"], 3, ROSTER)
    assert inbox.pop_arrivals(["b", "c"], 3, ROSTER) == GroupArrivals({}, ("b",), True)
    assert inbox.has_all(["b", "c"], 3, ROSTER), "who was late is suspected"
    assert inbox.pop_arrivals(["b"], 3, ROSTER) == GroupArrivals({}, (), False)


def test_suspected_neighbour_is_awaited_again_once_it_caught_up(inbox):
    inbox.suspect("b")
    assert inbox.look_up("b", 0, ROSTER) is Arrival.ABSENT
    inbox.start_step(5, lambda _: ())
    inbox.accept("b", beacon(4))
    assert inbox.look_up("b", 5, ROSTER) is Arrival.ABSENT
    inbox.accept("b", beacon(5))
    assert inbox.look_up("b", 5, ROSTER) is Arrival.AWAITED


def test_weights_far_ahead_or_behind_are_not_stored(inbox):
    inbox.start_step(10, lambda _: ())
    for step in (9, 11 + MAX_LEAD_STEPS, 1 << 40):
        for piece in pieces(step):
            inbox.accept("b", piece)
        assert inbox.look_up("b", step, ROSTER) is not Arrival.ARRIVED
    for piece in pieces(12):
        inbox.accept("b", piece)
    assert inbox.look_up("b", 12, ROSTER) is Arrival.ARRIVED
    inbox.start_step(13, lambda _: ())
    assert inbox.look_up("b", 12, ROSTER) is not Arrival.ARRIVED, "its memory is free again"
    for step in (20, 19, 18, 17):
        for piece in pieces(step):
            inbox.accept("b", piece)
    arrived = [s for s in range(30) if inbox.look_up("b", s, ROSTER) is Arrival.ARRIVED]
    assert arrived == [17, 18], "a neighbour's memory is bounded; the nearest steps count"


def test_weights_of_many_machines_are_bounded_and_displace_no_partner(inbox):
    """Fifty machines send weights that nobody mixes; partners of this step and the next do, too."""
    strangers = [f"stranger{number}" for number in range(50)]
    partners = {step: f"partner{step}" for step in range(4)}
    every = [*strangers, *partners.values()]
    for key in every:
        inbox.add_neighbour(key)
    inbox.start_step(0, lambda step: [partners[step]])

    def send_strangers() -> None:
        for key in strangers:
            for step in range(3):
                for piece in pieces(step):
                    inbox.accept(key, piece)
            found = [inbox.look_up(key, step, ROSTER) for key in every for step in range(4)]
            assert found.count(Arrival.ARRIVED) <= MAX_SPARE + 2

    send_strangers()
    for step, key in partners.items():
        for piece in pieces(step):
            inbox.accept(key, piece)
    send_strangers()
    for step, key in partners.items():
        assert inbox.look_up(key, step, ROSTER) is Arrival.ARRIVED


def test_wrong_sizes_and_places_end_the_channel(inbox):
    with pytest.raises(MessageError, match=f"this run's have {SIZE:,}"):
        inbox.accept("b", MixingFrame(FrameKind.WEIGHTS, 0, ROSTER, 99, 0, b"x"))
    first, last = pieces(0)
    inbox.accept("b", first)
    with pytest.raises(MessageError, match="does not follow"):
        inbox.accept("b", first.__class__(FrameKind.WEIGHTS, 0, ROSTER, SIZE, 7, last.data))
    inbox.accept("stranger", first)
    assert inbox.neighbours == ["b"]


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_a_message_error(data):
    try:
        frame = MixingFrame.unpack(data)
    except MessageError:
        return
    assert frame.pack() == data


def test_frame_survives_packing():
    frame = MixingFrame(FrameKind.WEIGHTS, 77, ROSTER, 500, 100, b"abc")
    assert MixingFrame.unpack(frame.pack()) == frame
    with pytest.raises(MessageError, match="impossible step or size"):
        MixingFrame.unpack(MixingFrame(FrameKind.WEIGHTS, 0, ROSTER, 2, 0, b"abc").pack())
    with pytest.raises(MessageError, match="kind 9"):
        MixingFrame.unpack(b"\x09" + frame.pack()[1:])
