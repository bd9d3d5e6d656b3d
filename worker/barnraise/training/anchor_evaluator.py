"""Evaluate a run's anchor at its milestones: its loss, its digest, and samples of its text."""

import logging
import math
import time
from collections.abc import Callable

from torch import Tensor

from barnraise.errors import TextError
from barnraise.exchange.exchange import Exchange
from barnraise.ledger.anchor import Anchor
from barnraise.ledger.ledger import Ledger
from barnraise.ledger.milestones import Milestone
from barnraise.planning.memory_model import HELD_OUT
from barnraise.planning.plan import Plan
from barnraise.text.batches import TokenDataset
from barnraise.training.join import JoinedRun
from barnraise.training.metrics import TrainingMetrics
from barnraise.training.samples import SampleWriter, is_elected
from barnraise.training.training_engine import TrainingEngine

log = logging.getLogger("barnraise")


class AnchorEvaluator:
    """Evaluates the anchor every `evaluate_every` tokens of the ledger."""

    def __init__(
        self,
        joined: JoinedRun,
        metrics: TrainingMetrics,
        exchange: Exchange,
        ledger: Ledger,
        is_leaving: Callable[[], bool],
    ) -> None:
        """Evaluate nothing yet: `open_text` comes first."""
        self._joined = joined
        self._metrics = metrics
        self._exchange = exchange
        self._ledger = ledger
        self._is_leaving = is_leaving
        self._milestone = -1  # number of the last evaluation, in multiples of `evaluate_every`
        self._held_out: list[Tensor] = []
        self._sample_writer: SampleWriter | None = None

    def open_text(self, text: TokenDataset, plan: Plan) -> None:
        """Read the held-out text, and load what writes samples: no machine of a crew writes any."""
        manifest, spec = self._joined.manifest, self._joined.spec
        self._held_out = text.validation_batches(HELD_OUT, spec.model.context)
        if not manifest.prompts or plan.is_stage:
            return
        tokenizer = self._ledger.blobs.read(manifest.tokenizer) if manifest.tokenizer else None
        try:
            self._sample_writer = SampleWriter(
                manifest.prompts, tokenizer, spec.model.vocabulary, spec.seed
            )
        except TextError as error:
            log.warning("this machine writes no samples: %s", error)

    def evaluate_if_due(
        self, engine: TrainingEngine, anchor: Anchor, at_once: bool = False
    ) -> None:
        """Evaluate the anchor on the held-out text, if it has reached a milestone."""
        recipe = self._joined.spec.recipe
        milestone = anchor.tokens // recipe.evaluate_every
        self._milestone = min(self._milestone, milestone)  # tokens may have been taken out
        if milestone == self._milestone and not at_once:
            return
        self._milestone = milestone
        started = time.monotonic()
        loss = engine.evaluate(self._held_out, self._is_leaving)
        if math.isnan(loss) and self._is_leaving():
            return
        self._metrics.record_validation(anchor.tokens, loss)
        if self._joined.spec.start.has_weights and not anchor.tokens:
            log.info("the run begins at a loss of %.4f nats a token on the held-out text", loss)
        self._write_samples(engine, anchor, time.monotonic() - started)
        if self._metrics.digests_anchor or anchor.tokens >= recipe.token_budget:
            # By this digest sites and peers compare their models.
            size = 4 * sum(fragment.size for fragment in self._joined.spec.model.fragments())
            digest = self._metrics.record_checkpoint(anchor, size)
            self._ledger.milestones.record(digest, Milestone(anchor.vector, anchor.retracted))
        self._exchange.remember_vector(anchor)
        if self._exchange.needs_listed_anchors:
            self._joined.coordinator.request_anchors()

    def _write_samples(
        self, engine: TrainingEngine, anchor: Anchor, evaluation_seconds: float
    ) -> None:
        """Write samples with the anchor, if the run has prompts and it is this machine's turn.

        What the run's owner has chosen for it never ends the training. Writing takes about as long
        as the evaluation before, at most.
        """
        neighbours = [neighbour.key for neighbour in self._exchange.stats.neighbours]
        has_turn = is_elected(self._metrics.key, neighbours, self._milestone)
        if self._sample_writer is None or not has_turn:
            return
        try:
            samples = self._sample_writer.write(
                engine, anchor.tokens, evaluation_seconds, self._is_leaving
            )
        except TextError as error:
            log.warning("this machine stops writing samples: %s", error)
            self._sample_writer = None
        else:
            self._metrics.record_samples(samples)
