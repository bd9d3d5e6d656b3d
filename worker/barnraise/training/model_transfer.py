"""Visitors of a run, who train nothing: one takes the shared weights along, the other keeps them there for who comes.

A finished run's machines have gone home. Whoever serves it holds what they all ended with; whoever fetches it takes
what two machines of different people agree on, where two can be asked, and may hold it against the site's digest.
"""

import time

from barnraise.errors import StateError
from barnraise.protocol.enums import Activity
from barnraise.training.train import Worker

PATIENCE = 20.0  # seconds until somebody who can be asked is heard of
TOLD = 2.0  # …in which peers say what they have
CATCH_UP = 60.0  # seconds a fetch waits for the updates since the cut it took


class ModelFetcher(Worker):
    """From the peers to this machine's folder, without the text and without a step. `digest`: afterwards, what came."""

    def prepare(self) -> None:
        """Raises StateError where nobody could be asked."""
        mark, cut = self.load_saved_state(), None
        self.exchange.add_peers(list(self.joined.peers))
        patience = time.monotonic() + PATIENCE
        while (
            mark is None
            and (cut := self.fetch_snapshot()) is None
            and time.monotonic() < patience
            and not self.poll_should_stop()
        ):
            time.sleep(0.5)  # who serves it may be about to be heard of
        if mark is None and cut is None and not self.leaving.is_set():
            raise StateError(
                f"no machine in the run '{self.joined.name}' could be asked for its weights; try again later"
            )
        if mark or cut:
            self.initialise_state(mark, cut)

    def train(self) -> None:
        """Nothing."""

    def evaluate_if_due(self, last: bool = False) -> None:
        """The text is not here, and nobody waits for this machine's opinion."""

    def drain(self) -> None:
        began = time.monotonic()
        self.metrics.set_idle(Activity.JOINING)

        def caught_up() -> bool:
            told = time.monotonic() - began > TOLD
            return self.leaving.is_set() or (told and not self.exchange.stats.updates_behind)

        self._trade_until(caught_up, CATCH_UP)
        self.digest, self.tokens = self.anchor.digest(), self.anchor.tokens
        self.metrics.set_idle(Activity.LEFT)
        self.save_checkpoint(closing=True)


class ModelServer(Worker):
    """Stays until it is told to leave, with the weights, the updates and the text that it has."""

    def train(self) -> None:
        self.exchange.announce_completion()
        self.metrics.set_idle(
            Activity.FINISHED if self.run_ended or self.budget_reached else Activity.PAUSED
        )
        while not (self.leaving.wait(0.05) or self.reporter.refused):
            self.resync_if_behind()
            self.exchange_updates()
            self.engine.apply_queued()

    def drain(self) -> None:
        self.metrics.set_idle(Activity.LEFT)
        self.save_checkpoint(closing=True)
