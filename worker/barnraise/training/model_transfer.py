"""Fetch or serve a run's weights without training.

The machines of a finished run have left it. A `ModelServer` keeps the final weights available, and
a `ModelFetcher` downloads them. The fetcher takes an anchor on which most volunteers agree, and
where only one can be asked that one's. The caller may compare its digest with the one that the site
lists.
"""

import math
import time

from barnraise.errors import StateError
from barnraise.protocol.enums import Activity, JoinPurpose
from barnraise.protocol.polling import NETWORK_POLL_SECONDS
from barnraise.training.train import Worker

PEER_SECONDS = 20.0  # a fetcher waits this long for a peer that can be asked
STATE_SECONDS = 2.0  # peers publish their state within this time
CATCH_UP_SECONDS = 60.0  # a fetcher waits this long for the updates since its snapshot


class ModelFetcher(Worker):
    """A worker that downloads the anchor into its folder. It needs no text and takes no step.

    `digest` and `tokens` describe the downloaded anchor, once `run` has returned.
    """

    join_purpose = JoinPurpose.FETCH
    digest: str
    tokens: int

    def prepare(self) -> None:
        """Load the saved anchor or fetch the peers'. The site does not count this machine.

        Raises:
            StateError: There is no saved anchor, and no peer could be asked.
        """
        self.metrics.set_idle(Activity.FETCHING)
        header = self.load_saved_state()
        snapshot = None
        self.exchange.add_peers(list(self.joined.peers))
        if header is None:
            deadline = time.monotonic() + PEER_SECONDS
            snapshot = self.prefetch.fetch_snapshot(trust_one=True)
            while snapshot is None and time.monotonic() < deadline and not self.poll_should_stop():
                # A peer that serves the weights may be about to connect.
                time.sleep(NETWORK_POLL_SECONDS)
                snapshot = self.prefetch.fetch_snapshot(trust_one=True)
        if header is None and snapshot is None:
            if self.leaving.is_set():
                return
            raise StateError(
                f"nobody shares '{self.joined.name}' now: no machine that has it is online. "
                "A machine that trained in it can share it with `barnraise serve`; try again later"
            )
        self.initialise_state(header, snapshot)

    def train(self) -> None:
        """Do nothing: a fetcher does not train."""

    def evaluate_if_due(self, at_once: bool = False) -> None:
        """Do nothing: the text is not here."""

    def drain(self) -> None:
        """Wait for the updates since the snapshot, and save the anchor."""
        started = time.monotonic()

        def has_caught_up() -> bool:
            states_received = time.monotonic() - started > STATE_SECONDS
            is_current = states_received and not self.exchange.stats.updates_behind
            return self.leaving.is_set() or is_current

        self.exchange_until(has_caught_up, CATCH_UP_SECONDS)
        self.digest = self.anchor.digest()
        self.tokens = self.anchor.tokens
        self.finish(Activity.FETCHING)


class ModelServer(Worker):
    """A worker that serves its weights, updates and text until it is told to leave."""

    ends_with_run = False

    def train(self) -> None:
        """Serve the peers' requests. Take no step."""
        self.exchange.announce_completion()
        status = self.status_publisher
        has_finished = status.run_ended or status.has_spent_budget(self.anchor)
        self.metrics.set_idle(Activity.FINISHED if has_finished else Activity.PAUSED)
        self.exchange_until(
            lambda: self.leaving.is_set() or self.reporter.refused is not None, math.inf
        )

    def drain(self) -> None:
        """Save the state."""
        self.finish(Activity.LEFT)
