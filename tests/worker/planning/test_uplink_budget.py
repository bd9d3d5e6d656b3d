"""Tests of how fast an uplink sends own updates: one formula for machines and estimates."""

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from barnraise.planning.lines import HOME_LINE, LINES
from barnraise.planning.uplink_budget import UPDATE_SHARE, UplinkUse, alike_uplink

RATES = st.floats(1e3, 1e10)


@given(RATES, st.floats(1, 64), st.floats(0, 2), st.integers(2, 1000))
def test_own_updates_get_what_relaying_leaves_and_their_part(rate, copies, share, machines):
    usable = UPDATE_SHARE * rate
    use = UplinkUse(rate, copies, share * usable, machines)
    least = usable / max(copies, machines - 1)
    assert use.update_rate >= least * (1 - 1e-9), "relaying never stops own rounds"
    if use.update_rate > least * (1 + 1e-6):
        assert use.update_rate * copies + use.relayed == pytest.approx(usable)


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
