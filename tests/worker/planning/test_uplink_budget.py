"""Tests of how fast an uplink sends own updates: one formula for machines and estimates."""

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from barnraise.planning.lines import HOME_LINE, LINES
from barnraise.planning.uplink_budget import UPDATE_SHARE, UplinkUse, alike_uplink

RATES = st.floats(1e3, 1e10)


@given(RATES, st.floats(0, 64), st.floats(0, 1e11), st.integers(1, 1000))
def test_own_updates_get_what_relaying_leaves_and_a_share_of_all(rate, copies, relayed, machines):
    use = UplinkUse(rate, copies, relayed, machines)
    own = use.update_rate * max(1.0, copies)
    assert own >= UPDATE_SHARE * rate / machines * (1 - 1e-9), "relaying never stops own rounds"
    if relayed <= UPDATE_SHARE * rate * (1 - 1 / machines):
        assert own + relayed == pytest.approx(UPDATE_SHARE * rate)


@pytest.mark.parametrize("machines", [1, 2, 12, 14, 32])
def test_own_copies_and_relayed_ones_fill_the_line_of_alike_machines(machines):
    """Each line carries R − 1 copies, own or relayed ones, also beyond twelve links."""
    whole = alike_uplink(HOME_LINE, machines)
    for own_copies in {1, min(3, machines - 1 or 1), max(1, machines - 1)}:
        relayed = (max(1, machines - 1) - own_copies) * whole.update_rate
        use = UplinkUse(HOME_LINE.up_bytes, own_copies, relayed, machines)
        assert use.update_rate == pytest.approx(whole.update_rate)


def test_one_fast_member_carries_what_it_can():
    rates = {
        machines: alike_uplink(HOME_LINE, machines, LINES[-1].up_bytes).update_rate
        / alike_uplink(HOME_LINE, machines).update_rate
        for machines in (3, 8, 16, 64)
    }
    assert rates[8] == pytest.approx(7), "one copy instead of seven"
    assert rates[16] == pytest.approx(100 / 1.5 / 14, rel=0.01), "its line is full"
    assert rates[64] < rates[16]


def test_unknown_uplink_limits_nothing():
    assert UplinkUse(math.inf, 3.0, 1e6, 4).update_rate == math.inf
    assert UplinkUse(0.0, 3.0, 1e6, 4).update_rate == 0.0
