"""Verdicts: what staff or a run's owner retract from the run.

This site signs a verdict; its replies to reports carry the verdict to the machines. They verify the
signature, subtract the named updates and gossip the verdict to their peers.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.conf import settings
from django.db import models
from django.db.models import Max
from django.utils import timezone
from uuid6 import uuid7

from barnraise.errors import MessageError, SpecError
from barnraise.protocol import messages, verdicts
from barnraise.protocol.coordinator_messages import MAX_VERDICTS_PER_REPLY
from barnraise.protocol.mirror_list import missing_signatures
from barnraise.protocol.signing import digest, open_signed
from coordinator.audit.log import record
from coordinator.eventlog import writer
from coordinator.fleet.verdict_requests import (
    ExclusionRequest,
    RetractionRequest,
    build_verdict,
    retraction_problems,
    signing_problem,
)
from coordinator.lib import site_identity
from coordinator.replication import mirror_list, volunteer_salt
from coordinator.runs.models import Run

MAX_REPLY_CHARS = 100_000  # of verdicts in one reply


class VerdictRecord(models.Model):
    """A verdict: the exact text of a `verdicts.Verdict`, and mirrors' signatures of it by key.

    Machines receive it once it is `proven`: as many mirrors have signed as bind all machines. It
    then has a `position`, by which machines say how far they have applied the run's verdicts.
    """

    if TYPE_CHECKING:
        run_id: UUID
        by_id: UUID | None

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="verdicts")
    body = models.TextField(editable=False)
    digest = models.CharField(max_length=64, editable=False)
    signatures = models.JSONField(editable=False)
    proven = models.BooleanField(default=False, editable=False)
    position = models.BigIntegerField(null=True, editable=False)
    given = models.DateTimeField("signed", default=timezone.now, editable=False)
    by = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        null=True,
        on_delete=models.SET_NULL,
        related_name="+",
        editable=False,
    )

    class Meta:
        ordering = ["-id"]
        constraints = [models.UniqueConstraint(fields=["run", "digest"], name="one_verdict_a_text")]
        verbose_name = "verdict"

    def __str__(self) -> str:
        return f"{self.digest[:12]} on {self.run}"

    @property
    def message(self) -> verdicts.Verdict:
        """The parsed text."""
        return verdicts.Verdict.model_validate_json(self.body)

    @property
    def aggregate_name(self) -> str:
        """The name by which the event log knows it."""
        return f"{self.run_id}:{self.digest}"

    def event_payload(self) -> dict[str, Any]:
        """Build the payload of "verdict.give"."""
        return {
            "id": self.pk,
            "body": self.body,
            "signatures": self.signatures,
            "given": self.given,
            "by": self.by_id,
        }

    @property
    def signed_verdict(self) -> verdicts.SignedVerdict:
        """The form in which machines receive it."""
        return verdicts.SignedVerdict(body=self.body, signatures=self.signatures)

    @classmethod
    def issue(
        cls,
        run: Run,
        requests: Sequence[RetractionRequest],
        reason: str = "",
        *,
        exclude: Sequence[ExclusionRequest] = (),
        clear: Sequence[Any] = (),
        actor: Any = None,
    ) -> "VerdictRecord":
        """Sign a verdict with this site's key and store it; everybody may read its one-line reason.

        `clear` names people whose updates the machines have withheld until now.

        Raises:
            SpecError: with a sentence for each field ("run", "author", "first", "updates",
                "reason") that is not valid.
        """
        with writer.log_transaction():
            run = Run.objects.select_for_update(of=("self",)).get(pk=run.pk)
            problems = retraction_problems(run, requests, exclude, clear)
            if problems:
                raise SpecError(problems)
            verdict = build_verdict(run, requests, exclude, reason, clear)
            signed = site_identity.identity().sign("verdict", verdict)
            row = cls.objects.create(
                run=run,
                body=signed.body,
                digest=digest(signed.body),
                signatures={signed.key: signed.signature},
                by=actor if getattr(actor, "pk", None) else None,
            )
            row.update_force()
            RunExclusion.store_for(row)
            writer.record("verdict.give", row.aggregate_name, row.event_payload())
            record(
                "run.exclude" if exclude else "run.verdict",
                run,
                actor=actor,
                after=verdict.after,
                updates=verdict.updates,
                people=[str(item.person.pk) for item in exclude],
                cleared=[str(person.pk) for person in clear],
                reason=verdict.reason,
                digest=row.digest,
            )
        return row

    def countersign(self, *, actor: Any = None) -> bool:
        """Add this site's signature, as somebody decided who signed in here.

        Returns:
            False if this site has signed already.

        Raises:
            SpecError: the run is not under way, or this site may not sign for it.
        """
        with writer.log_transaction():
            row = VerdictRecord.objects.select_for_update(of=("self",)).get(pk=self.pk)
            identity = site_identity.identity()
            if identity.key in row.signatures:
                return False
            problem = signing_problem(row.run)
            signed = identity.sign("verdict", row.message)
            if problem or signed.body != row.body:
                raise SpecError({"run": problem or "another version wrote this verdict"})
            row.signatures = {**row.signatures, signed.key: signed.signature}
            row.save(update_fields=["signatures"])
            row.update_force()
            writer.record("verdict.give", row.aggregate_name, row.event_payload())
            record("run.verdict_signed", row.run, actor=actor, digest=row.digest)
        self.refresh_from_db()
        return True

    @property
    def is_signed_here(self) -> bool:
        """Whether this site has signed it."""
        return site_identity.identity().key in self.signatures

    @property
    def missing_signatures(self) -> int:
        """How many mirrors have to sign it before machines obey it."""
        spec = self.run.spec
        return missing_signatures(
            spec.roots,
            spec.threshold,
            mirror_list.list_of_run(spec.roots),
            [key for key in self.signatures if self._is_signature_valid(key)],
            self.message.mirror_list_version,
        )

    def _is_signature_valid(self, key: str) -> bool:
        signed = messages.Signed(key=key, body=self.body, signature=self.signatures[key])
        try:
            open_signed(signed, "verdict", verdicts.Verdict)
        except MessageError:
            return False
        return True

    def update_force(self) -> None:
        """Bring `proven` up to date, and `position` where it becomes proven; in a transaction."""
        proven = self.missing_signatures == 0
        if proven == self.proven and proven == (self.position is not None):
            return
        self.proven = proven
        self.position = None
        if proven:
            last = VerdictRecord.objects.filter(run=self.run_id).aggregate(last=Max("position"))
            self.position = (last["last"] or 0) + 1
        self.save(update_fields=["proven", "position"])

    @classmethod
    def list_after(cls, run: object, position: int) -> tuple[list[verdicts.SignedVerdict], int]:
        """List the next proven verdicts after a position, and the position of the last of them."""
        rows = cls.objects.filter(run=run, position__gt=position).order_by("position")
        listed: list[verdicts.SignedVerdict] = []
        size = 0
        for row in rows[:MAX_VERDICTS_PER_REPLY]:
            size += len(row.body)
            if listed and size > MAX_REPLY_CHARS:
                break
            listed.append(row.signed_verdict)
            position = row.position or position
        return listed, position


class RunExclusion(models.Model):
    """A key or volunteer that a verdict excludes from its run."""

    verdict = models.ForeignKey(VerdictRecord, on_delete=models.CASCADE, related_name="exclusions")
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="exclusions")
    party = models.CharField(max_length=64)  # a machine's key, or a volunteer's pseudonym

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["verdict", "party"], name="one_exclusion_a_verdict")
        ]
        indexes = [models.Index(fields=["run", "party"])]

    def __str__(self) -> str:
        return f"{self.party[:12]} from {self.run}"

    @classmethod
    def store_for(cls, verdict: VerdictRecord) -> None:
        """Store the parties that a verdict excludes."""
        message = verdict.message
        rows = [
            cls(verdict=verdict, run_id=verdict.run_id, party=party)
            for party in (*message.keys, *message.volunteers)
        ]
        cls.objects.bulk_create(rows, ignore_conflicts=True)


def exclusion_problem(run: Run, key: str, person: UUID) -> str:
    """Return why a machine has no place in the run, as a sentence; "" if no verdict excludes it.

    Verdicts that this site signed count here at once; those of others when they bind all machines.
    """
    parties = [key, volunteer_salt.volunteer_pseudonym(person)]
    own_key = site_identity.identity().key
    verdict = (
        VerdictRecord.objects.filter(exclusions__run=run.pk, exclusions__party__in=parties)
        .filter(models.Q(proven=True) | models.Q(signatures__has_key=own_key))
        .first()
    )
    if verdict is None:
        return ""
    reason = verdict.message.reason
    return (
        f"the owner of the run {run.name} has excluded you from it"
        f"{f': {reason}' if reason else ''}; you can train in other runs"
    )


def excluded_machines(members: Sequence[Any]) -> set[tuple[UUID, UUID]]:
    """Return the (run, machine) of those memberships that `exclusion_problem` refuses, at once."""
    own_key = site_identity.identity().key
    here = models.Q(verdict__proven=True) | models.Q(verdict__signatures__has_key=own_key)
    rows = RunExclusion.objects.filter(here, run__in={member.run_id for member in members})
    excluded = set(rows.values_list("run", "party"))
    if not excluded:
        return set()
    people = volunteer_salt.volunteer_pseudonyms({m.machine.owner_id for m in members})
    return {
        (m.run_id, m.machine_id)
        for m in members
        if {(m.run_id, m.machine.key), (m.run_id, people[m.machine.owner_id])} & excluded
    }


def update_all_forces(**_: Any) -> None:
    """Bring every verdict's force up to date: another mirror list is in force."""
    for row in VerdictRecord.objects.select_related("run"):
        row.update_force()
