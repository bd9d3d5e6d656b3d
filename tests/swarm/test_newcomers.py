"""A newcomer trains from its first round on; what it trains counts once others find it good."""

import pytest

from barnraise.protocol.enums import Standing


@pytest.mark.parametrize(
    "strategy", ["streams", pytest.param("decentralized-adam", marks=pytest.mark.slow)]
)
def test_newcomers_training_counts_once_the_owners_machine_agrees(swarm, strategy):
    run = swarm(token_budget=10_000_000, strategy=strategy)
    run.set_standings(ada=Standing.OWNER, ben=Standing.NEWCOMER)
    ben = run.start("ben")
    run.until(lambda: ben.status.get("step", 0) > 20)
    assert not ben.worker.anchor.vector and not ben.status["updates_sent"], "nobody attests it"
    ada = run.start("ada", knows=["ben"])
    run.until(lambda: ben.status.get("updates_sent", 0) > 0)
    assert ben.worker.exchange.author.probation is None
    run.until(lambda: ben.worker.key in {a.partition(".")[0] for a in ada.worker.anchor.vector})
    ben.leave()
    ada.leave()
