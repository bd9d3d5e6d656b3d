"""An owner's limits, and those that a command is given while the owner changes others."""

from dataclasses import fields, replace

from hypothesis import given
from hypothesis import strategies as st

from barnraise.planning.limits import Limits, merge_limits

CHANGES = {
    "memory": 4 << 30,
    "cpu": 50,
    "clipping": "exact",
    "hours": "mon-fri 09:00-17:00",
    "idle": 10,
}
SOME = st.sets(st.sampled_from(sorted(CHANGES)))


@given(at_first=SOME, asked=SOME, later=SOME)
def test_limits_set_later_win_over_those_given_at_the_start(at_first, asked, later):
    before = replace(Limits(), **{name: CHANGES[name] for name in at_first})
    requested = replace(before, **{name: CHANGES[name] for name in asked})
    default = Limits()
    toggled = {name: vars(default)[name] if name in at_first else CHANGES[name] for name in later}
    now = replace(before, **toggled)
    merged = merge_limits(before, requested, now)
    for field in fields(Limits):
        source = now if field.name in later else requested
        assert getattr(merged, field.name) == getattr(source, field.name)


def test_limit_set_while_a_join_waits_is_not_overwritten():
    before = Limits(cpu=50)
    given_at_the_start = replace(before, memory=8 << 30, disk=9 << 30)
    now = replace(before, memory=4 << 30, cpu=25)
    assert merge_limits(before, given_at_the_start, now) == Limits(
        cpu=25, memory=4 << 30, disk=9 << 30
    )
