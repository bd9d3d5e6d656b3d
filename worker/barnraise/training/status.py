"""Publish this worker's status, and obey the coordinator's answers.

A report takes one way: `TrainingMetrics` composes it, the reporter spools and sends it, and the
same figures go into the status file for people and programs on this machine.
"""

import logging
import time
from collections import deque
from dataclasses import asdict

from barnraise.coordinator_client.reporter import Reporter, VerdictBatch
from barnraise.durable_io import write_atomically
from barnraise.errors import MessageError, UnprovenVerdictError
from barnraise.exchange.exchange import Exchange
from barnraise.exchange.verdicts.verdict_handler import VERDICT_FOLDER
from barnraise.ledger.anchor import Anchor
from barnraise.ledger.ledger import Ledger
from barnraise.ledger.verdict_set import verify_proof
from barnraise.peering.addresses.nat_type import describe_nat
from barnraise.planning.limits import Limits
from barnraise.planning.plan import Plan
from barnraise.protocol.coordinator_messages import Directive
from barnraise.protocol.enums import Activity, RunStatus
from barnraise.protocol.messages import Signed
from barnraise.protocol.reports import LimitsView
from barnraise.protocol.signing import digest
from barnraise.protocol.verdicts import SignedVerdict
from barnraise.spec import RunSpec
from barnraise.training.attestation import Attester
from barnraise.training.join import DIRECTIVE_FILE, JoinedRun
from barnraise.training.local_status import LocalStatus
from barnraise.training.metrics import TrainingMetrics
from barnraise.training.progress_history import ProgressHistory

log = logging.getLogger("barnraise")


def token_budget(spec: RunSpec, directive: Directive) -> int:
    """Return the run's budget in tokens: the spec's, unless the coordinator has extended it.

    The learning-rate schedule stays the spec's: an extension trains at its last learning rate.
    """
    return max(spec.recipe.token_budget, directive.token_budget or 0)


def describe_limits(limits: Limits) -> LimitsView:
    """Return the owner's limits as the owner's page on the site shows them."""
    return LimitsView(**{name: getattr(limits, name) for name in LimitsView.model_fields})


class StatusPublisher:
    """Publishes the worker's status and passes the coordinator's answers to the exchange."""

    def __init__(
        self,
        joined: JoinedRun,
        plan: Plan,
        metrics: TrainingMetrics,
        reporter: Reporter,
        exchange: Exchange,
        ledger: Ledger,
    ) -> None:
        """Keep references to the parts that the status describes. `ledger` is the exchange's."""
        self._joined = joined
        self._plan = plan
        self._metrics = metrics
        self._reporter = reporter
        self._exchange = exchange
        self._ledger = ledger
        self._verdicts = VerdictBatch()  # of the coordinator: not applied yet
        self._attester = Attester(joined.coordinator.identity, joined.run, ledger)
        # Digests of verdicts that were refused, so that each is logged only once.
        self._refused_verdicts: deque[str] = deque(maxlen=64)
        self._history = ProgressHistory()
        self._applied_directive: Signed | None = None
        self._reach = ""  # the sentence that was logged last
        self._revoked_keys = joined.directive.revoked

    def publish(self, anchor: Anchor, at_once: bool = False) -> LocalStatus | None:
        """Publish to the coordinator, the peers and the status file, when it is due.

        Returns:
            The status as written to the status file; None when it was not due.
        """
        if not (at_once or self._metrics.is_status_due()):
            return None
        stats = self._exchange.stats
        report = self._metrics.compose_report(
            anchor, stats, self._joined.folder.label.incarnation, self._exchange.addresses()
        )

        # To the coordinator, through the reporter's thread.
        self._reporter.update_figures(report)
        attestations = self._attester.attest_new_updates(anchor.heads, at_once)
        if attestations and not self._reporter.has_attestations:
            self._reporter.set_attestations(attestations)

        # To the peers.
        if report.anchor:
            self._exchange.report_anchor_digest(report.vector, report.anchor)
            self._exchange.remember_vector(anchor)
        self._exchange.announce_rate(self._metrics.tokens_per_second)

        # From the coordinator.
        self._obey_coordinator()

        # To people and programs on this machine.
        is_training = report.activity is Activity.TRAINING
        loss = self._metrics.loss
        self._history.record(time.monotonic(), report.ledger_tokens, loss, is_training)
        local = {
            "run": self._joined.run,
            "name": self._joined.name,
            "device": ", ".join(each.device for each in self._plan.device_plans),
            "token_budget": self.token_budget,
            "coordinator_bytes": self._joined.coordinator.body_bytes,
            "refused": self.refusal,
            "waiting": stats.waiting_reason or self._exchange.author.probation,
            "reach": self._describe_reach(),
            "reach_facts": asdict(self._exchange.reach_facts),
            "run_rate": self._history.tokens_per_second,
            "losses": self._history.losses,
            "neighbours": stats.neighbours,
            "checksum": stats.checksum,
        }
        status = LocalStatus(**dict(report) | local | self._metrics.status_fields())
        self._joined.folder.write_status(status.model_dump(mode="json"))
        return status

    @property
    def token_budget(self) -> int:
        """Return the run's budget in tokens."""
        return token_budget(self._joined.spec, self._reporter.directive)

    @property
    def refusal(self) -> str | None:
        """Return why this machine has no place in the run any longer; None if it has."""
        exchange = self._exchange
        return self._reporter.refused or exchange.author.exclusion or exchange.copied_key

    def has_spent_budget(self, anchor: Anchor) -> bool:
        """Return whether the run's token budget is spent, as far as this machine's ledger shows."""
        return anchor.tokens >= self.token_budget

    def describe_suspension(self, anchor: Anchor) -> str:
        """Return why the run, or this machine in it, is suspended, as a sentence; "" if not."""
        if self.has_spent_budget(anchor) and self._exchange.grows_too_fast:
            return (
                "the budget is spent, but the ledger grew faster than the machines of this run can "
                "train by their tickets: this machine waits for the run's owner, who can exclude a "
                "volunteer or end the run"
            )
        return self._exchange.author.suspension or ""

    @property
    def run_ended(self) -> bool:
        """Return whether the run, or this machine's part in it, has ended."""
        has_ended = self._reporter.directive.status in (RunStatus.FINISHED, RunStatus.CANCELLED)
        return has_ended or self.refusal is not None

    def describe_end(self) -> str:
        """Return why this machine has nothing to do in the run, for its owner; "" while it has."""
        status = f"'{self._joined.name}' is {self._reporter.directive.status}"
        return (self.refusal or status) if self.run_ended else ""

    def _describe_reach(self) -> str:
        """Return how peers reach this machine, in a sentence that is logged when it changes."""
        sentence = describe_nat(self._exchange.reach_facts)
        if sentence and sentence != self._reach:
            self._reach = sentence
            log.info("%s", sentence)
        return sentence

    def _obey_coordinator(self) -> None:
        """Pass what the coordinator has answered to the exchange and the state folder."""
        reporter, exchange = self._reporter, self._exchange
        peers = reporter.pop_peers()
        if peers:  # each call wakes the exchange's thread
            exchange.add_peers(peers)
        exchange.set_listed_anchors(self._joined.coordinator.confirmed_anchors(self._joined.run))
        exchange.set_source_ip(reporter.source_ip or self._joined.source_ip)
        newer_lists = exchange.set_mirror_lists(self._joined.coordinator.mirror_lists)
        if newer_lists:
            self._joined.coordinator.receive_mirror_lists(newer_lists)
        signed = reporter.signed_directive or self._joined.signed_directive
        if signed is not None and signed is not self._applied_directive:
            self._applied_directive = signed
            exchange.apply_directive(signed)
            if reporter.directive.revoked != self._revoked_keys:
                self._revoked_keys = reporter.directive.revoked
                self._joined.folder.save_message(DIRECTIVE_FILE, signed)
        exchange.set_orphaned(reporter.is_orphaned)
        ticket = reporter.pop_ticket()
        if ticket:
            exchange.renew_ticket(ticket)
        self._verdicts = reporter.pop_verdicts() or self._verdicts
        self._verdicts.waiting = [
            verdict for verdict in self._verdicts.waiting if not self._store_verdict(verdict)
        ]
        if not self._verdicts.waiting:
            reporter.confirm_verdicts(self._verdicts)

    def _store_verdict(self, verdict: SignedVerdict) -> bool:
        """Store a verdict of the coordinator where `barnraise verdict` stores its own.

        The exchange reads that folder, applies each verdict and sends it to the peers.

        Returns:
            Whether the coordinator need not send it again: it is applied, or it is invalid.
        """
        name = digest(verdict.body)
        text = verdict.model_dump_json()
        # The same verdict may come again with another, valid signature: compare the whole text.
        if digest(text) in self._refused_verdicts:
            return True
        try:
            verified = verify_proof(verdict, self._exchange.rules)
        except UnprovenVerdictError as error:
            log.debug("a verdict waits for the mirror list that it names: %s", error)
            return False
        except MessageError as error:
            self._refused_verdicts.append(digest(text))
            log.error(
                "the verdict that %s sends is refused: %s", self._joined.coordinator.url, error
            )
            return True
        if self._ledger.verdicts.covers(verified):
            return True
        write_atomically(self._joined.folder.path / VERDICT_FOLDER / f"{name}.json", text.encode())
        return False
