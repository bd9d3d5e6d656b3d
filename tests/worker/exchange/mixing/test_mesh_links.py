"""Test when a member of a mesh that does not answer is dialled again."""

from barnraise.exchange.mixing.mesh_links import (
    MAX_REDIAL_SECONDS,
    REDIAL_SECONDS,
    compute_redial_pause,
)


def test_redials_of_a_member_back_off_up_to_a_limit() -> None:
    pauses = [compute_redial_pause(failures) for failures in range(4)]
    assert pauses == [factor * REDIAL_SECONDS for factor in (1, 2, 4, 8)]
    assert compute_redial_pause(20) == MAX_REDIAL_SECONDS
    assert compute_redial_pause(100_000) == MAX_REDIAL_SECONDS, "2¹⁰²⁴ is no float"
