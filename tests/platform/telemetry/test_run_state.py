"""Test the description of a run's state: every state has its own tiles, cards and sentence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.protocol.enums import RunStatus
from coordinator.telemetry.run_state import Card, HeadTile, StateFacts, describe_state

FACTS = st.builds(
    StateFacts,
    status=st.sampled_from(RunStatus),
    tokens=st.integers(0, 10**9),
    budget=st.integers(1, 10**9),
    rate=st.floats(0, 1e6),
    has_loss=st.booleans(),
    has_score=st.booleans(),
    alive=st.integers(0, 3000),
    paused=st.integers(0, 3000),
    has_model=st.booleans(),
    confirmed_by=st.integers(0, 3),
)
LIVE_TILES = {HeadTile.RATE, HeadTile.MACHINES, HeadTile.AGREE}
ENDED = (RunStatus.FINISHED, RunStatus.CANCELLED)


@given(FACTS)
def test_state_shows_nothing_that_it_cannot_have(facts):
    state = describe_state(facts)
    has_trained = facts.has_loss or facts.tokens > 0
    assert state.notice.endswith(".") and len(state.tiles) in (0, 5 + facts.has_score)
    assert len({*state.tiles}) == len(state.tiles)
    assert HeadTile.AGREE not in state.tiles or facts.alive > 1, "nothing to compare"
    assert HeadTile.CONFIRMED not in state.tiles or facts.confirmed_by, "nobody confirms"
    assert bool(state.tiles) == (has_trained and facts.status in {*ENDED, "training", "paused"})
    assert (Card.CHARTS in state.cards) == has_trained, "an empty run has no empty charts"
    assert (Card.STEPS in state.cards) == (not has_trained and facts.status not in ENDED)
    if facts.status in ENDED:
        assert not state.is_live and not LIVE_TILES & {*state.tiles}
        assert not {Card.JOIN, Card.CONNECTIONS, Card.PROGRESS} & {*state.cards}


@pytest.mark.parametrize(
    ("facts", "notice"),
    [
        (StateFacts(RunStatus.DRAFT), "A draft: it starts once it is launched."),
        (StateFacts(RunStatus.TRAINING, 1000, 10_000, 10.0, True, 1), "about 15 min left."),
        (StateFacts(RunStatus.TRAINING, 1000, 10_000, 0.0, True, 3), "3 machines train."),
        (StateFacts(RunStatus.TRAINING, 1, 9, 0.0, True, 3, 1), "2 machines train, 1 is paused."),
        (
            StateFacts(RunStatus.TRAINING, 1, 9, 0.0, True, 1, 1),
            "No machine trains now: 1 is paused",
        ),
        (
            StateFacts(RunStatus.TRAINING, 1000, 10_000, 0.0, True, 4, updates=0),
            "4 machines train. The shared weights are still those of the start",
        ),
        (StateFacts(RunStatus.PAUSED, 1000, 10_000, 0.0, True, 2), "2 machines wait"),
        (StateFacts(RunStatus.FINISHED, 720_000, 720_000), "Finished after 720 K tokens."),
        (
            StateFacts(RunStatus.FINISHED, 307_200, 300_000),
            "307 K tokens: what was under way at 300 K counts as well.",
        ),
        (StateFacts(RunStatus.CANCELLED), "Cancelled before it trained."),
    ],
)
def test_notice_says_how_the_run_stands(facts, notice):
    assert notice in describe_state(facts).notice


def test_finished_run_shows_how_it_ended():
    state = describe_state(StateFacts(RunStatus.FINISHED, 720_000, confirmed_by=2))
    assert state.tiles == (
        HeadTile.FINAL,
        HeadTile.TOKENS,
        HeadTile.CONTRIBUTORS,
        HeadTile.ELAPSED,
        HeadTile.CONFIRMED,
    )
    alone = describe_state(StateFacts(RunStatus.FINISHED, 720_000, has_model=True))
    assert alone.tiles == (*state.tiles[:-1], HeadTile.UPDATES)
    assert Card.MODEL in alone.cards and Card.MODEL not in state.cards
