"""Texts that peers and sites write are printed and logged."""

import pytest

from barnraise.peering.transports.transport import ChannelClosedError
from barnraise.protocol.coordinator_messages import Problem
from barnraise.protocol.messages import Goodbye
from barnraise.protocol.types import replace_unprintable

FORGED = "bye\n2026-11-26 ERROR forged\x1b[2J\x9b1A\u202e\u2028"
PLAIN = "bye 2026-11-26 ERROR forged [2J 1A"


def test_strangers_text_begins_no_line_and_controls_no_terminal():
    assert Goodbye(reason=FORGED).reason == PLAIN
    assert Problem(error=FORGED, fields={FORGED: FORGED}).fields == {PLAIN: PLAIN}
    assert str(ChannelClosedError(FORGED)) == PLAIN
    assert len(str(ChannelClosedError("x" * 100_000))) == 200, "a QUIC close has any length"


@pytest.mark.parametrize("text", ["", "Zoë's barn", "二号機", "a\u00a0b", "x + y ≥ 2⁶⁴ …"])
def test_printable_text_stays_as_it_is(text):
    assert replace_unprintable(text) == text
