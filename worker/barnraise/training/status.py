"""What a worker says as it goes: figures to its coordinator, its status file and its peers; and what the coordinator
answered, to the exchange."""

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from barnraise.coordinator_client.reporter import Reporter
from barnraise.durable_io import write_atomically
from barnraise.errors import MessageError
from barnraise.exchange.exchange import Exchange
from barnraise.exchange.handlers.verdict_handler import VERDICT_FOLDER
from barnraise.exchange.ledger.anchor import Anchor
from barnraise.exchange.ledger.ledger import Ledger
from barnraise.exchange.ledger.validation import UpdateRules
from barnraise.exchange.ledger.verdicts import verify_proof
from barnraise.planning.plan import Plan
from barnraise.protocol.coordinator_messages import Directive
from barnraise.protocol.signing import digest
from barnraise.protocol.verdicts import SignedVerdict
from barnraise.spec import RunSpec
from barnraise.training.attestation import Attester
from barnraise.training.join import DIRECTIVE_FILE, JoinedRun
from barnraise.training.metrics import TrainingMetrics

log = logging.getLogger("barnraise")


def token_budget(spec: RunSpec, directive: Directive) -> int:
    """Tokens: the spec's, or more where the coordinator says so. The schedule of the learning rate stays the spec's, so
    what comes after its end is trained at its last rate."""
    return max(spec.recipe.token_budget, directive.token_budget or 0)


class StatusPublisher:
    def __init__(
        self,
        place: JoinedRun,
        plan: Plan,
        progress: TrainingMetrics,
        reporter: Reporter,
        exchange: Exchange,
        ledger: Ledger,
        watch: Callable[[dict[str, Any]], None],
    ):
        """`watch` is handed the status as well. The ledger is the exchange's."""
        self._place, self._plan, self._watch, self._ledger = place, plan, watch, ledger
        self._rules = UpdateRules.from_spec(place.spec, place.run, frozenset(place.spec.roots))
        self._witnessing = Attester(place.coordinator.identity, place.run, ledger)
        self._refused: deque[str] = deque(maxlen=64)  # verdicts: one sentence each is enough
        self._progress, self._reporter, self._exchange = progress, reporter, exchange
        self._revoked = place.directive.revoked

    def publish(self, anchor: Anchor, at_once: bool = False) -> None:
        """When it is time to, or at once."""
        progress, reporter, exchange = self._progress, self._reporter, self._exchange
        if not progress.due(at_once):
            return
        incarnation, links = self._place.folder.label.incarnation, exchange.stats
        numbers = progress.numbers(anchor, links, incarnation, exchange.addresses())
        reporter.update_figures(numbers)
        if (
            told := self._witnessing.attest_new_updates(anchor.heads, at_once)
        ) and not reporter.set_attestations:
            reporter.set_attestations = told
        if numbers.anchor:
            exchange.report_anchor_digest(numbers.vector, numbers.anchor)
        exchange.announce_rate(progress.tokens_per_second)
        self._hear()
        status = {
            "run": self._place.run,
            "name": self._place.name,
            "device": self._plan.device,
            "token_budget": self.token_budget,
            "coordinator_bytes": self._place.coordinator.body_bytes,
            "refused": reporter.refused,
            "checksum": {
                "checked": links.fragments_checked,
                "corruptions": links.corruptions,
                "repaired": links.repaired,
                "damaged": links.damaged_fragment,
            },
            **progress.status(numbers),
        }
        self._place.folder.write_status(status)
        self._watch(status)

    @property
    def token_budget(self) -> int:
        """Tokens."""
        return token_budget(self._place.spec, self._reporter.directive)

    def _hear(self) -> None:
        reporter, exchange = self._reporter, self._exchange
        if peers := reporter.pop_peers():  # what is no news need not wake the exchange's thread
            exchange.add_peers(peers)
        if newer := exchange.set_mirror_lists(self._place.coordinator.mirror_lists):
            self._place.coordinator.receive_mirror_lists(newer)
        if reporter.signed_directive and reporter.directive.revoked != self._revoked:
            self._revoked = reporter.directive.revoked
            self._place.folder.save_message(DIRECTIVE_FILE, reporter.signed_directive)
        if revoked := reporter.directive.revoked:
            exchange.revoke_keys(revoked, reporter.signed_directive)
        exchange.set_orphaned(reporter.is_orphaned)
        if ticket := reporter.pop_ticket():
            exchange.renew_ticket(ticket)
        for ruling in reporter.pop_rulings():
            self._rule(ruling)
        reporter.set_applied_verdicts(tuple(self._ledger.verdicts.rulings))

    def _rule(self, ruling: SignedVerdict) -> None:
        """A verdict in the coordinator's answer goes where `barnraise verdict` leaves those of the run's owner."""
        name, whole = digest(ruling.body), ruling.model_dump_json()
        if name in self._ledger.verdicts.rulings or digest(whole) in self._refused:
            return
        try:
            verify_proof(ruling, self._rules)
        except MessageError as error:
            self._refused.append(digest(whole))  # of another signature the same text may be true
            log.error(
                "the verdict that %s sends is refused: %s", self._place.coordinator.url, error
            )
            return
        write_atomically(self._place.folder.path / VERDICT_FOLDER / f"{name}.json", whole.encode())
