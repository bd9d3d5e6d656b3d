"""How much of what a volunteer requests it is sent, as a pure state machine."""

import hypothesis.strategies as st
from hypothesis import given

from barnraise.peering.limits.served_pieces import REPEAT_LIMITS, ServedPieces

MEBIBYTE = 1 << 20
REQUESTS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5)), max_size=200)


@given(REQUESTS)
def test_volunteer_is_sent_everything_once_and_a_bounded_part_of_it_again(requests):
    served, sent, new = ServedPieces(), {"a": 0, "b": 0}, {"a": set(), "b": set()}
    for number, (volunteer, piece) in enumerate(requests):
        is_sent = served.try_send(volunteer, "key", f"{piece}", MEBIBYTE, float(number))
        assert is_sent or piece in new[volunteer]
        new[volunteer].add(piece)
        sent[volunteer] += is_sent
        most = (1 + REPEAT_LIMITS.share) * len(new[volunteer]) + REPEAT_LIMITS.bytes / MEBIBYTE
        assert sent[volunteer] <= most


def test_machine_that_lost_its_folder_is_sent_all_again_after_a_while():
    served, pieces = ServedPieces(), [f"{number}" for number in range(200)]

    def request_all(now: float) -> int:
        return sum(served.try_send("a", "key", piece, MEBIBYTE, now) for piece in pieces)

    assert request_all(0.0) == 200
    assert request_all(60.0) == 28
    assert request_all(REPEAT_LIMITS.forget_seconds - 1.0) == 0
    assert request_all(REPEAT_LIMITS.forget_seconds) == 200


def test_volunteer_is_sent_everything_once_for_each_of_a_few_machines():
    served = ServedPieces()
    sent = [served.try_send("a", f"{machine}", "piece", 1 << 30, 0.0) for machine in range(20)]
    assert sum(sent) == REPEAT_LIMITS.machines
