"""Verdicts: what staff, or a run's owner, take out of it again. This site signs them; its answers to reports carry them
to the machines, which look at the signature, subtract what is named, and hand them on to each other."""

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.conf import settings
from django.db import models
from django.utils import timezone
from pydantic import ValidationError
from uuid6 import uuid7

from barnraise.errors import SpecError
from barnraise.protocol import enums, verdicts
from barnraise.protocol.signing import digest
from barnraise.protocol.verdicts import MAX_AUTHORS, MAX_SINGLE_UPDATES, MAX_VERDICTS
from coordinator.audit.log import record
from coordinator.eventlog import writer as mirrors
from coordinator.lib import site_identity
from coordinator.runs.models import Run

ACTIVE_STATUSES = (enums.RunStatus.RECRUITING, enums.RunStatus.TRAINING, enums.RunStatus.PAUSED)
LAST = (1 << 53) - 1  # the highest number of an update
AUTHOR = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{16}")


@dataclass(frozen=True)
class RetractionRequest:
    """Against one author (KEY.LIFE): its updates from number `first` on, where there is one, and single `updates`, by
    number with the tokens that they claim to be of; 0 where nobody knows: those stay in the run's count."""

    author: str
    first: int | None = None
    updates: Mapping[int, int] = field(default_factory=dict)


class VerdictRecord(models.Model):
    """`body` is the exact text of a `wire.Verdict`, `signatures` those of mirrors, by key. Machines are told of it once
    it is `proven`: as many mirrors have signed as the run's rules ask for."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="verdicts")
    body = models.TextField(editable=False)
    digest = models.CharField(max_length=64, editable=False)
    signatures = models.JSONField(editable=False)
    proven = models.BooleanField(default=False, editable=False)
    given = models.DateTimeField(default=timezone.now, editable=False)
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

    def __str__(self) -> str:
        return f"{self.digest[:12]} on {self.run}"

    @property
    def message(self) -> verdicts.Verdict:
        return verdicts.Verdict.model_validate_json(self.body)

    @property
    def aggregate_name(self) -> str:
        """By which mirrors know it."""
        return f"{self.run_id}:{self.digest}"

    def event_payload(self) -> dict:
        """To other mirrors."""
        return {
            "id": self.pk,
            "body": self.body,
            "signatures": self.signatures,
            "given": self.given,
            "by": self.by_id,
        }

    @property
    def ruling(self) -> verdicts.SignedVerdict:
        """As machines take it."""
        return verdicts.SignedVerdict(body=self.body, signatures=self.signatures)

    @classmethod
    def issue(
        cls, run: Run, charges: Sequence[RetractionRequest], reason: str = "", *, actor=None
    ) -> "VerdictRecord":
        """Signed by this mirror, and noted. Raises SpecError, with a sentence for each field ("run", "author", "first",
        "updates", "reason") that makes no sense."""
        with mirrors.log_transaction():
            run = Run.objects.select_for_update(of=("self",)).get(pk=run.pk)
            if found := retraction_problems(run, charges):
                raise SpecError(found)
            try:
                said = verdicts.Verdict(
                    run=str(run.pk),
                    after={each.author: each.first - 1 for each in charges if each.first},
                    updates={each.author: dict(each.updates) for each in charges if each.updates},
                    reason=reason.strip(),
                    issued=time.time(),
                )
            except ValidationError:
                raise SpecError(
                    {"reason": "say why in 100 characters or fewer, on one line"}
                ) from None
            signed = site_identity.identity().sign("verdict", said)
            made = cls.objects.create(
                run=run,
                body=signed.body,
                digest=digest(signed.body),
                signatures={signed.key: signed.signature},
                proven=run.spec.threshold == 1,
                by=actor if getattr(actor, "pk", None) else None,
            )
            mirrors.record("verdict.give", made.aggregate_name, made.event_payload())
            told = {
                "after": said.after,
                "updates": said.updates,
                "reason": said.reason,
                "digest": made.digest,
            }
            record("run.verdict", run, actor=actor, **told)
        return made

    @classmethod
    def unacknowledged_by(
        cls, run: object, heeds: list[str], most: int = 2
    ) -> list[verdicts.SignedVerdict]:
        """Of a run's (by its id), some that a machine which heeds those digests has not heard of."""
        found = (
            cls.objects.filter(run=run, proven=True).exclude(digest__in=heeds).order_by("pk")[:most]
        )
        return [each.ruling for each in found]


def retraction_problems(run: Run, charges: Sequence[RetractionRequest]) -> dict[str, str]:
    """What keeps these charges from becoming a verdict: field → sentence."""
    found: dict[str, str] = {}
    if run.state not in ACTIVE_STATUSES:
        found["run"] = f"the run {run.name} is {run.status}: verdicts are for one that is under way"
    elif site_identity.identity().key not in run.spec.roots:
        found["run"] = (
            f"the rules of {run.name} do not list this site: its machines would not believe it"
        )
    elif run.verdicts.count() >= MAX_VERDICTS:
        found["run"] = (
            f"{run.name} has its {MAX_VERDICTS} verdicts: go on from a checkpoint, as a new run"
        )
    if not 1 <= len(charges) <= MAX_AUTHORS:
        found["author"] = f"name 1 to {MAX_AUTHORS} machines"
    for each in charges if not found else ():
        found |= _senseless(run, each)
    return found


def _senseless(run: Run, charge: RetractionRequest) -> dict[str, str]:
    key, _, life = charge.author.partition(".")
    member = (
        run.memberships.filter(machine__key=key).first()
        if AUTHOR.fullmatch(charge.author)
        else None
    )
    if member is None:
        return {"author": "name one life of a machine that has been in the run, as KEY.LIFE"}
    if charge.first is None and not charge.updates:
        return {"first": "say from which update on, or name single ones"}
    if charge.first is not None and not 1 <= charge.first <= LAST:
        return {"first": "updates are numbered from 1"}
    if len(charge.updates) > MAX_SINGLE_UPDATES or not all(
        1 <= seq <= LAST for seq in charge.updates
    ):
        return {"updates": f"name at most {MAX_SINGLE_UPDATES}, each a number from 1"}
    most = run.spec.max_tokens_per_update
    if not all(0 <= tokens <= most for tokens in charge.updates.values()):
        return {"updates": f"an update of this run has {most:,} tokens at most"}
    named = {"first": charge.first or LAST, "updates": min(charge.updates, default=LAST)}
    oldest = _oldest(run, member, member.lives.get(life, 0))
    for name, seq in named.items():
        if seq < oldest:
            return {
                name: f"update {seq} is too old to come out: verdicts reach back {run.spec.verdict_horizon} rounds, "
                f"here to update {oldest}. Go on from a checkpoint before it, as a new run"
            }
    return {}


def _oldest(run: Run, member: Any, last: int) -> int:
    """The first update, of `last` in its author's life, whose bytes machines must still have. Reckoned from what they
    report: a round is one update of everybody, and all keep pace with each other."""
    trained = run.memberships.filter(updates_sent__gt=0).values_list("tokens", "updates_sent")
    everybody = sum(tokens / updates for tokens, updates in trained)
    if not everybody:
        return 0
    passed = (
        max(0, run.ledger_tokens - member.ledger_tokens) / everybody
    )  # rounds since it was last heard of
    return last - math.floor(run.spec.verdict_horizon - passed)


# ---- whose ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AuthorChoice:
    """One of a machine's in a run: its updates are numbered from 1. `present`: the one it is at."""

    author: str
    machine: str
    person: str
    updates: int
    present: bool

    def __str__(self) -> str:
        which = "" if self.present else f", its earlier life {self.author[-16:-8]}…"
        return f"{self.machine} of {self.person}{which}: {self.updates} update{'s' * (self.updates != 1)}"


def list_authors(run: Run, most: int = 500) -> list[AuthorChoice]:
    """Of the machines that were heard of last."""
    members = (
        run.memberships.exclude(incarnation="")
        .select_related("machine__owner")
        .order_by("-last_seen")[:most]
    )
    return [
        AuthorChoice(
            f"{m.machine.key}.{life}",
            m.machine.name,
            m.machine.owner.shown_name,
            updates,
            life == m.incarnation,
        )
        for m in members
        for life, updates in sorted(
            m.lives.items(), key=lambda each: (each[0] != m.incarnation, each)
        )
    ][:most]


def resolve_author(run: Run, said: str) -> str:
    """KEY.LIFE of a machine that is called so: by that, its id, the beginning of its key, or its name; where no life is
    said, the one it is at. Raises SpecError."""
    if AUTHOR.fullmatch(said):
        return said
    which = models.Q(machine__hostname=said)
    if re.fullmatch(r"[0-9a-f]{8,64}", said):
        which |= models.Q(machine__key__startswith=said)
    if re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", said):
        which |= models.Q(machine=said)
    found = list(
        run.memberships.filter(which).exclude(incarnation="").select_related("machine")[:2]
    )
    if len(found) != 1:
        raise SpecError(
            {
                "author": f"{len(found) or 'no'} machines of this run are called '{said[:60]}': give its key"
            }
        )
    return f"{found[0].machine.key}.{found[0].incarnation}"


def parse_single_updates(text: str) -> dict[int, int]:
    """ "7, 9:40960" as number → tokens. Raises SpecError."""
    found = {}
    for each in text.replace(",", " ").split():
        number, _, tokens = each.partition(":")
        if not (number + tokens).isdecimal() or not each.isascii() or not number or len(each) > 40:
            raise SpecError(
                {"updates": f"'{each[:40]}' is not a number, nor one with its tokens, like 7:40960"}
            )
        found[int(number)] = int(tokens or 0)
    return found


def count_incarnation_updates(
    before: Mapping[str, int], incarnation: str, updates: int, most: int = 64
) -> dict[str, int]:
    """The lives of a machine's state folder in a run, each with its number of updates, once a report of the present one
    has told of so many all told. At most so many lives."""
    others = {life: count for life, count in before.items() if life != incarnation}
    count = max(before.get(incarnation, 0), updates - sum(others.values()))
    return dict(sorted(others.items())[: most - 1]) | {incarnation: count}
