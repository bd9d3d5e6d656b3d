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


class Fetcher(Worker):
    """From the peers to this machine's folder, without the text and without a step. `digest`: afterwards, what came."""

    def join(self) -> None:
        """Raises StateError where nobody could be asked."""
        mark, cut = self.restored(), None
        self.exchange.add_peers(list(self.place.peers))
        patience = time.monotonic() + PATIENCE
        while (
            mark is None
            and (cut := self.snapshot()) is None
            and time.monotonic() < patience
            and not self.waited()
        ):
            time.sleep(0.5)  # who serves it may be about to be heard of
        if mark is None and cut is None and not self.leaving.is_set():
            raise StateError(
                f"no machine in the run '{self.place.name}' could be asked for its weights; try again later"
            )
        if mark or cut:
            self.settle_in(mark, cut)

    def train(self) -> None:
        """Nothing."""

    def validate(self, last: bool = False) -> None:
        """The text is not here, and nobody waits for this machine's opinion."""

    def settle(self) -> None:
        began = time.monotonic()
        self.progress.rest(Activity.JOINING)

        def caught_up() -> bool:
            told = time.monotonic() - began > TOLD
            return self.leaving.is_set() or (told and not self.exchange.stats.updates_behind)

        self._trade_until(caught_up, CATCH_UP)
        self.digest, self.tokens = self.anchor.digest(), self.anchor.tokens
        self.progress.rest(Activity.LEFT)
        self.save(closing=True)


class Server(Worker):
    """Stays until it is told to leave, with the weights, the updates and the text that it has."""

    def train(self) -> None:
        self.exchange.announce_completion()
        self.progress.rest(Activity.FINISHED if self.over or self.spent else Activity.PAUSED)
        while not (self.leaving.wait(0.05) or self.reporter.refused):
            self.catch_up()
            self.trade()
            self.engine.apply_queued()

    def settle(self) -> None:
        self.progress.rest(Activity.LEFT)
        self.save(closing=True)
