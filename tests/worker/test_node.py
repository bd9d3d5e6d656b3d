"""The exchange between whole nodes, on a network in memory: real files, real threads, real signatures."""


def test_three_nodes_trade_updates_and_agree_to_the_last_bit(world):
    a, b, c = (world.machine(n).start() for n in (1, 2, 3))
    b.knows(a)
    c.knows(a)
    for seed in range(4):
        for machine in (a, b, c):
            machine.round(100 * machine.number + seed)
            machine.step()
    world.agree(a, b, c)
    assert a.anchor.tokens == a.ledger.tokens == 12 * 100
    assert (a.node.stats.updates_sent, a.node.stats.updates_received, a.node.stats.behind) == (4, 8, 0)
    assert a.node.stats.bytes_sent > 0 < a.node.stats.bytes_received
