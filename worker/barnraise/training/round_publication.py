"""Publish what a replica has learnt in a round, or withdraw it where it would not count."""

from collections.abc import Collection

from barnraise.exchange.exchange import Exchange
from barnraise.ledger.anchor import Anchor
from barnraise.planning.round_schedule import RoundSchedule
from barnraise.training.training_engine import Encoder, TrainingEngine


def publish_round(
    exchange: Exchange,
    engine: TrainingEngine,
    anchor: Anchor,
    round_schedule: RoundSchedule,
    tokens_per_second: float,
    fragments_due: Collection[int] | None = None,
) -> None:
    """Publish what the replica has learnt since the last update, and record it in the anchor.

    Args:
        exchange: sends the update.
        engine: trains the replica.
        anchor: of the run.
        round_schedule: how the update is compressed, and where the next round begins.
        tokens_per_second: of this machine, by which the update's weight is computed.
        fragments_due: indices of the fragments whose round ends; None: of all fragments.
    """
    if exchange.author.suspension:
        engine.reset_round()  # nothing that this machine publishes would count
        return
    exchange.author.log_probation()
    tokens = engine.round_tokens
    parts = engine.end_round(
        Encoder(round_schedule.scheme),
        exchange.compute_weight(tokens_per_second),
        fragments_due,
        round_schedule.carries_residual,
        round_schedule.has_momentum(exchange.rounds_published),
    )
    with exchange.new_update(tokens) as update:
        for part in parts:
            update.add(part.fragment, part.payload, part.units)
            del part  # free it before the next fragment's part is computed
    if update.withdrawal is None:
        anchor.record(update.header)
        return
    # Take a round out of the anchor that would not count: of a newcomer, or just suspended.
    # Peers compare what a newcomer has learnt; optimizers and error feedback go on.
    engine.queue_updates(exchange.withdraw(update.withdrawal))
    engine.apply_queued()
    exchange.on_withdrawn(update.withdrawal)
