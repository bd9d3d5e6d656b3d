"""Pauses double up to a bound, however long something fails."""

from barnraise.peering.limits.back_off import BackOff


def test_pause_doubles_up_to_the_longest_one():
    back_off = BackOff(first_seconds=2.0, most_seconds=60.0)
    assert [back_off.pause_seconds(n) for n in range(6)] == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0]
    assert back_off.pause_seconds(100_000) == 60.0, "2¹⁰²⁴ is no float"
