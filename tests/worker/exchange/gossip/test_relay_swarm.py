"""Tests of sixteen machines in simulated time: one fast line carries for fifteen slow ones.

`make bench-exchange ONLY=relay` measures the same over real lines.
"""

import pytest
from helpers.network.relay_swarm import HOME, RelaySwarm


@pytest.mark.parametrize("seed", [0])
def test_fast_line_carries_for_home_lines_until_it_is_killed(seed):
    swarm = RelaySwarm(seed)
    swarm.run(84)
    start = swarm.now
    swarm.run(128)
    slow = swarm.rounds_each(start, swarm.now)
    swarm.speed_up()
    swarm.run(100)
    start, sent = swarm.now, swarm.bytes_sent()
    swarm.run(64)
    assert swarm.rounds_each(start, swarm.now) >= 4 * slow
    assert swarm.mean_copies() <= 1.3
    bytes_sent = [after - before for before, after in zip(sent, swarm.bytes_sent(), strict=True)]
    assert max(bytes_sent) <= 0.4 * HOME * (swarm.now - start), "they hardly relay"
    start = swarm.now
    swarm.kill(0)
    swarm.run(150)
    # On lines that are full again chance decides which machine has a third round meanwhile.
    *most, last = sorted(swarm.rounds_until_repaired(start))
    assert max(most) <= 2 and last <= 3
