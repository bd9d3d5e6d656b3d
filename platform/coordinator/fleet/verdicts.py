"""Verdicts: what staff or a run's owner retract from the run.

This site signs a verdict; its replies to reports carry the verdict to the machines. They verify the
signature, subtract the named updates and gossip the verdict to their peers.
"""

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.conf import settings
from django.db import models
from django.db.models import Max
from django.utils import timezone
from pydantic import ValidationError
from uuid6 import uuid7

from barnraise.errors import MessageError, SpecError
from barnraise.protocol import enums, messages, verdicts
from barnraise.protocol.coordinator_messages import MAX_VERDICTS_PER_REPLY
from barnraise.protocol.mirror_list import missing_signatures
from barnraise.protocol.signing import digest, open_signed
from barnraise.protocol.verdicts import MAX_AUTHORS, MAX_SINGLE_UPDATES, MAX_VERDICT_BYTES
from coordinator.audit.log import record
from coordinator.eventlog import writer
from coordinator.fleet.witness_models import UpdateWitness, VouchedAuthor
from coordinator.lib import site_identity
from coordinator.replication import mirror_list, volunteer_salt
from coordinator.runs.models import Run

ACTIVE_STATUSES = (enums.RunStatus.RECRUITING, enums.RunStatus.TRAINING, enums.RunStatus.PAUSED)
MAX_EXCLUDED = 20  # people in one verdict
MAX_REPLY_CHARS = 100_000  # of verdicts in one reply
MAX_UPDATE_NUMBER = (1 << 53) - 1
AUTHOR = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{16}")


@dataclass(frozen=True)
class RetractionRequest:
    """What to retract of one author.

    Attributes:
        author: KEY.INCARNATION of a machine.
        first: retract its updates from this number on; None for no such range.
        updates: single updates to retract: number → the tokens it claims. With 0 tokens, where the
            number is unknown, the update's tokens stay in the run's count.
    """

    author: str
    first: int | None = None
    updates: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ExclusionRequest:
    """A volunteer to exclude from a run, with all machines.

    Attributes:
        person: the volunteer.
        remove_updates: remove all of their updates that verdicts still reach; False: what they
            published so far stays.
    """

    person: Any
    remove_updates: bool = True


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
        actor: Any = None,
    ) -> "VerdictRecord":
        """Sign a verdict with this site's key and store it.

        Args:
            run: the run.
            requests: what to retract.
            exclude: whom to exclude.
            reason: why, one line that everybody may read.
            actor: who decided it.

        Raises:
            SpecError: with a sentence for each field ("run", "author", "first", "updates",
                "reason") that is not valid.
        """
        with writer.log_transaction():
            run = Run.objects.select_for_update(of=("self",)).get(pk=run.pk)
            problems = retraction_problems(run, requests, exclude)
            if problems:
                raise SpecError(problems)
            verdict = _build_verdict(run, requests, exclude, reason)
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
        """List the next proven verdicts for a machine, and the position of the last of them.

        Args:
            run: the run's id.
            position: of the last verdict that the machine has applied.
        """
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

    Args:
        run: the run.
        key: the machine's key.
        person: its owner.
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
    """Return the (run, machine) of those memberships that `exclusion_problem` refuses, at once.

    Args:
        members: memberships of any mirror, with their machines.
    """
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


def _build_verdict(
    run: Run,
    requests: Sequence[RetractionRequest],
    exclude: Sequence[ExclusionRequest],
    reason: str,
) -> verdicts.Verdict:
    newest = mirror_list.list_of_run(run.spec.roots)
    keys: dict[str, dict[str, int]] = {}
    volunteers: dict[str, dict[str, int]] = {}
    for item in exclude:
        kept = _kept_updates(run, item)
        volunteers[volunteer_salt.volunteer_pseudonym(item.person.pk)] = kept
        for key in item.person.machines.values_list("key", flat=True)[:MAX_AUTHORS]:
            keys[key] = {author: last for author, last in kept.items() if author.startswith(key)}
    try:
        verdict = verdicts.Verdict(
            run=str(run.pk),
            keys=keys,
            volunteers=volunteers,
            mirror_list_version=newest.version if newest else 0,
            after={item.author: item.first - 1 for item in requests if item.first},
            updates={item.author: dict(item.updates) for item in requests if item.updates},
            reason=reason.strip(),
            issued=time.time(),
        )
    except ValidationError:
        raise SpecError({"reason": "say why in 100 characters or fewer, on one line"}) from None
    if len(verdict.model_dump_json().encode()) > MAX_VERDICT_BYTES:
        problem = "a verdict has a limit of {:,} bytes: decide on fewer machines or updates at once"
        raise SpecError({"author": problem.format(MAX_VERDICT_BYTES)})
    return verdict


def _kept_updates(run: Run, exclusion: ExclusionRequest) -> dict[str, int]:
    """Return author → the last update that stays, of those of an excluded volunteer.

    No number is beyond what others have seen: an excluded volunteer's later updates up to it would
    count, from any peer that passes them on.
    """
    kept: dict[str, int] = {}
    for machine, key, incarnation, reported in _list_authors_of(run, exclusion.person):
        updates = _published_updates(run, machine, incarnation, reported)
        if exclusion.remove_updates:
            oldest = _oldest_retractable(run, machine, incarnation)
            updates = max(0, min(updates, oldest - 1))
        if updates and len(kept) < MAX_AUTHORS:
            kept[f"{key}.{incarnation}"] = updates
    return kept


def _list_authors_of(run: Run, person: Any) -> list[tuple[UUID, str, str, int]]:
    """List the (machine, key, incarnation, updates that it reports) of a person in a run.

    Incarnations that others vouch for come first, reported or not: nobody can hide old updates,
    which machines could not take out any longer, by reporting under another name.
    """
    authors: dict[tuple[UUID, str, str], int] = {}
    vouched = VouchedAuthor.objects.filter(run=run, machine__owner=person).order_by("-seq", "pk")
    for machine, key, incarnation in vouched.values_list("machine", "machine__key", "incarnation"):
        authors[machine, key, incarnation] = 0
    members = run.memberships.filter(machine__owner=person).select_related("machine")
    for member in members.order_by("-last_seen"):
        for incarnation, updates in member.updates_by_incarnation.items():
            authors[member.machine_id, member.machine.key, incarnation] = updates
    return [(*author, updates) for author, updates in authors.items()]


def _published_updates(run: Run, machine: UUID, incarnation: str, reported: int) -> int:
    """Return how many updates of an author there are, as far as others have seen them.

    What the author reports counts only in a run in which nobody has witnessed anything of it.
    """
    of_run = VouchedAuthor.objects.filter(run=run, seq__gt=0)
    vouched = of_run.filter(machine=machine, incarnation=incarnation).first()
    if vouched is not None:
        return vouched.seq
    if of_run.exists():
        return 0
    witnesses = UpdateWitness.objects.filter(run=run, machine=machine, incarnation=incarnation)
    return max(witnesses.values_list("seq", flat=True), default=reported)


def signing_problem(run: Run) -> str:
    """Return why this site cannot sign verdicts on a run, as a sentence; "" if it can."""
    if run.state not in ACTIVE_STATUSES:
        return f"the run {run.name} is {run.status}: verdicts are for one that is under way"
    roots = run.spec.roots
    newest = mirror_list.list_of_run(roots)
    signers = newest.signers_at(newest.version) if newest else frozenset(roots)
    if site_identity.identity().key not in signers:
        return f"the rules of {run.name} do not list this site: its machines would not believe it"
    return ""


def retraction_problems(
    run: Run,
    requests: Sequence[RetractionRequest],
    exclude: Sequence[ExclusionRequest] = (),
) -> dict[str, str]:
    """Return why these requests cannot become a verdict: field → sentence."""
    problems: dict[str, str] = {}
    problem = signing_problem(run)
    if problem:
        problems["run"] = problem
    if exclude:
        if any(item.person.pk == run.owner_id for item in exclude):
            problems["person"] = "the run's owner cannot be excluded from it"
        if len(exclude) > MAX_EXCLUDED:
            problems["person"] = f"name 1 to {MAX_EXCLUDED} people"
        if not requests:
            return problems
    if not 1 <= len(requests) <= MAX_AUTHORS:
        problems["author"] = f"name 1 to {MAX_AUTHORS} machines"
    for request in requests if not problems else ():
        problems |= _request_problems(run, request)
    return problems


def _request_problems(run: Run, request: RetractionRequest) -> dict[str, str]:
    key, _, incarnation = request.author.partition(".")
    member = None
    if AUTHOR.fullmatch(request.author):
        member = run.memberships.filter(machine__key=key).first()
    if member is None:
        return {"author": "name one incarnation of a machine of the run, as KEY.INCARNATION"}
    if request.first is None and not request.updates:
        return {"first": "say from which update on, or name single ones"}
    if request.first is not None and not 1 <= request.first <= MAX_UPDATE_NUMBER:
        return {"first": "updates are numbered from 1"}
    numbers_valid = all(1 <= number <= MAX_UPDATE_NUMBER for number in request.updates)
    if len(request.updates) > MAX_SINGLE_UPDATES or not numbers_valid:
        return {"updates": f"name at most {MAX_SINGLE_UPDATES}, each a number from 1"}
    max_tokens = run.spec.max_tokens_per_update
    if not all(0 <= tokens <= max_tokens for tokens in request.updates.values()):
        return {"updates": f"an update of this run has {max_tokens:,} tokens at most"}
    earliest = {
        "first": request.first or MAX_UPDATE_NUMBER,
        "updates": min(request.updates, default=MAX_UPDATE_NUMBER),
    }
    oldest = _oldest_retractable(run, member.machine_id, incarnation)
    for name, number in earliest.items():
        if number < oldest:
            return {
                name: f"update {number} is too old to come out: verdicts reach back "
                f"{run.spec.verdict_horizon} rounds, here to update {oldest}. "
                "Go on from a checkpoint before it, as a new run"
            }
    return {}


def _oldest_retractable(run: Run, machine: UUID, incarnation: str) -> int:
    """Estimate the first update of an author that machines must still have the payload of.

    Machines keep payloads for `verdict_horizon` rounds. A round is one update of everybody. What
    the author reports of itself counts for nothing, so that nobody can make themselves immune. Each
    witness shows up to which update the author was witnessed, and when: the rounds since then
    follow from the run's count. The least of these estimates counts.

    Args:
        run: the run.
        machine: the author's machine.
        incarnation: the author's incarnation.
    """
    vouched = VouchedAuthor.objects.filter(run=run, seq__gt=0).values_list("total", "seq")
    round_tokens = sum(total / seq for total, seq in vouched)
    if not round_tokens:
        return 0
    witnesses = UpdateWitness.objects.filter(run=run, machine=machine, incarnation=incarnation)
    estimates = [
        seq + max(0, run.ledger_tokens - run_tokens) / round_tokens
        for seq, run_tokens in witnesses.values_list("seq", "run_tokens")
    ]
    return math.ceil(min(estimates, default=0) - run.spec.verdict_horizon)


# ---- authors ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class AuthorChoice:
    """One incarnation of a machine in a run, to choose from; its updates are numbered from 1.

    `is_present`: the machine trains as this incarnation now.
    """

    author: str
    machine: str
    person: str
    updates: int
    is_present: bool

    def __str__(self) -> str:
        incarnation = "" if self.is_present else f", its earlier incarnation {self.author[-16:-8]}…"
        plural = "" if self.updates == 1 else "s"
        return f"{self.machine} of {self.person}{incarnation}: {self.updates} update{plural}"


def list_authors(run: Run, most: int = 500) -> list[AuthorChoice]:
    """List the authors of a run, the most recently seen machines first."""
    members = (
        run.memberships.exclude(incarnation="")
        .select_related("machine__owner")
        .order_by("-last_seen")[:most]
    )
    authors = [
        AuthorChoice(
            author=f"{member.machine.key}.{incarnation}",
            machine=member.machine.name,
            person=member.machine.owner.shown_name,
            updates=updates,
            is_present=incarnation == member.incarnation,
        )
        for member in members
        for incarnation, updates in _present_first(
            member.updates_by_incarnation, member.incarnation
        )
    ]
    return authors[:most]


def _present_first(
    updates_by_incarnation: Mapping[str, int], present: str
) -> list[tuple[str, int]]:
    return sorted(updates_by_incarnation.items(), key=lambda item: (item[0] != present, item))


def resolve_author(run: Run, name: str) -> str:
    """Return the author, KEY.INCARNATION, that a person means.

    Args:
        run: the run.
        name: an author; or a machine's id, name, or the beginning of its key, for its present
            incarnation.

    Raises:
        SpecError: no machine of the run, or more than one, is called so.
    """
    if AUTHOR.fullmatch(name):
        return name
    matches = models.Q(machine__hostname=name)
    if re.fullmatch(r"[0-9a-f]{8,64}", name):
        matches |= models.Q(machine__key__startswith=name)
    if re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", name):
        matches |= models.Q(machine=name)
    members = run.memberships.filter(matches).exclude(incarnation="").select_related("machine")
    candidates = list(members[:2])
    if len(candidates) != 1:
        count = len(candidates) or "no"
        raise SpecError(
            {"author": f"{count} machines of this run are called '{name[:60]}': give its key"}
        )
    return f"{candidates[0].machine.key}.{candidates[0].incarnation}"


def parse_single_updates(text: str) -> dict[int, int]:
    """Parse "7, 9:40960" to number → tokens.

    Raises:
        SpecError: a part is not a number.
    """
    updates = {}
    for part in text.replace(",", " ").split():
        number, _, tokens = part.partition(":")
        is_numeric = (number + tokens).isdecimal() and part.isascii()
        if not is_numeric or not number or len(part) > 40:
            raise SpecError(
                {"updates": f"'{part[:40]}' is not a number, nor one with its tokens, like 7:40960"}
            )
        updates[int(number)] = int(tokens or 0)
    return updates


def count_incarnation_updates(
    before: Mapping[str, int], incarnation: str, updates: int, most: int = 64
) -> dict[str, int]:
    """Return how many updates each incarnation of a machine has published, after a new report.

    A report counts the updates of all incarnations together; the earlier ones' are known.

    Args:
        before: incarnation → updates, before the report.
        incarnation: the present one.
        updates: the total that the report states.
        most: how many incarnations to keep.
    """
    others = {name: count for name, count in before.items() if name != incarnation}
    count = max(before.get(incarnation, 0), updates - sum(others.values()))
    return dict(sorted(others.items())[: most - 1]) | {incarnation: count}
