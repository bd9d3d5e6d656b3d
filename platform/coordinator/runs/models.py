"""A run: one model being trained, its owner, and where it is in its life."""

import dataclasses
import json
from functools import lru_cache

from django.conf import settings
from django.db import IntegrityError, models, transaction
from django.db.models import Q
from django.utils import timezone
from django.utils.text import slugify
from uuid6 import uuid7

from barnraise.errors import SpecError
from barnraise.protocol import coordinator_messages, enums, messages
from barnraise.protocol.signing import digest
from barnraise.spec import RunSpec, Start, problems
from coordinator.audit.log import record
from coordinator.eventlog import writer as mirrors
from coordinator.lib import site_identity
from coordinator.lib.exceptions import UserError
from coordinator.runs import lifecycle
from coordinator.runs.invitations import Guest as Guest
from coordinator.runs.invitations import RunInvitation as RunInvitation
from coordinator.runs.join_policy import OPEN_TO_ALL, Access, JoinPolicy
from coordinator.runs.lifecycle import LifecycleFacts
from coordinator.runs.querysets import ID, RunQuerySet
from coordinator.runs.replicated import run_events

Status = enums.RunStatus
MAX_TOKEN_BUDGET = 10**15  # as a spec's budget
RESERVED_SLUGS = ("new", "estimate")  # addresses beside the runs' own


class Run(models.Model):
    """`draft` is the spec as the owner last wrote it; at launch it is completed (mirrors' keys, the manifest and its
    signer) and kept as `spec_text`, exact bytes that never change again."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    slug = models.SlugField(max_length=100, unique=True, editable=False)
    name = models.CharField(max_length=80)
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="runs"
    )
    status = models.CharField(
        max_length=12,
        choices=[(s.value, s.value) for s in Status],
        default=Status.DRAFT.value,
        editable=False,
    )
    launch_requested = models.BooleanField(default=False, editable=False)
    draft = models.JSONField(editable=False)
    spec_text = models.TextField(blank=True, editable=False)
    spec_digest = models.CharField(max_length=64, blank=True, editable=False)
    manifest = models.JSONField(null=True, blank=True, editable=False)  # wire.Signed
    quorum = models.PositiveIntegerField(
        default=1, help_text="Machines that must be alive before training starts."
    )
    report_every = models.FloatField(
        default=10.0, help_text="Seconds between two reports of a machine."
    )
    ledger_tokens = models.BigIntegerField(default=0, editable=False)
    extra_tokens = models.BigIntegerField(
        default=0, editable=False
    )  # what it was given beyond its spec's budget
    created = models.DateTimeField(default=timezone.now, editable=False)
    launched = models.DateTimeField(null=True, editable=False)
    started = models.DateTimeField(null=True, editable=False)
    finished = models.DateTimeField(null=True, editable=False)
    archived = models.DateTimeField(
        null=True, editable=False
    )  # put away: in no list, yet at its address
    parent = models.ForeignKey(
        "self", null=True, editable=False, on_delete=models.SET_NULL, related_name="copies"
    )
    access = models.CharField(max_length=12, choices=Access, default=Access.ANYONE)
    least_memory = models.BigIntegerField(default=0)
    least_device_memory = models.BigIntegerField(default=0)
    notes = models.TextField(blank=True)
    team = models.ForeignKey(
        "accounts.Team", null=True, on_delete=models.SET_NULL, related_name="runs"
    )

    objects = RunQuerySet.as_manager()

    class Meta:
        ordering = ["-created"]
        indexes = [models.Index(fields=["status"])]

    def __str__(self) -> str:
        return self.name

    def get_absolute_url(self) -> str:
        return f"/runs/{self.slug}/"

    # ---- what it is ------------------------------------------------------------------------------------------

    @property
    def state(self) -> Status:
        return Status(self.status)

    @property
    def spec(self) -> RunSpec:
        return RunSpec.from_json(self.spec_text or json.dumps(self.draft))

    @property
    def token_budget(self) -> int:
        """Without reading the whole spec."""
        pinned = (
            _pinned_budget(self.spec_text)
            if self.spec_text
            else int(self.draft["recipe"]["token_budget"])
        )
        return pinned + self.extra_tokens

    @property
    def max_plausible_tokens(self) -> int:
        """A loss measured past so many is a lie or a mistake, and would squeeze all others into a corner."""
        return 2 * max(self.ledger_tokens, self.token_budget)

    @property
    def is_over(self) -> bool:
        return self.state in (Status.FINISHED, Status.CANCELLED)

    def to_message(self) -> coordinator_messages.RunView:
        signed = messages.Signed.model_validate(self.manifest) if self.manifest else None
        spec = self.spec_text or RunSpec.to_json(self.spec)
        return coordinator_messages.RunView(
            id=str(self.pk),
            slug=self.slug,
            name=self.name,
            status=self.state,
            spec=spec,
            manifest=signed,
        )

    @property
    def join_policy(self) -> JoinPolicy:
        return JoinPolicy(
            self.access, self.least_memory, self.least_device_memory, self.notes, self.team_id
        )

    # ---- who may do what -------------------------------------------------------------------------------------

    def may_see(self, user) -> bool:
        return bool(self.spec_text) or self.may_control(user)

    def may_control(self, user) -> bool:
        """Edit, launch, pause, resume, cancel."""
        return bool(getattr(user, "is_active", False)) and (
            self.owner_id == user.pk or user.is_staff
        )

    def accepts_machines_of(self, user) -> bool:
        """Whether this person's machines may join, as far as people go."""
        if self.access == Access.ANYONE or self.owner_id == user.pk:
            return True
        if self.access == Access.TEAM:
            return bool(self.team_id) and user.teams.filter(pk=self.team_id).exists()
        return self.guests.filter(user=user).exists()

    @property
    def access_description(self) -> str:
        """Whom it takes, to follow its name in a sentence."""
        if self.access == Access.TEAM:
            return (
                f"takes the machines of the team {self.team}"
                if self.team
                else "takes the machines of a team that is gone"
            )
        return (
            "takes anybody's machines"
            if self.access == Access.ANYONE
            else "takes the machines of who was invited"
        )

    def allows_action(self, action: str) -> bool:
        """Whether "launch", "edit", "pause", "resume", "cancel", "finish", "archive" or "unarchive" makes sense now."""
        if "archive" in action:
            return self.is_over and (self.archived is None) == (action == "archive")
        if action in ("launch", "edit"):
            return self.state is Status.DRAFT and not self.launch_requested
        return self.state in lifecycle.TRANSITIONS[action][0]

    # ---- what happens to it ----------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        owner,
        name: str,
        spec: RunSpec,
        *,
        report_every: float = 10.0,
        quorum: int = 1,
        terms: JoinPolicy = OPEN_TO_ALL,
        parent: "Run | None" = None,
    ) -> "Run":
        """A draft. Raises SpecError, with a sentence for each field that makes no sense."""
        name = _clean_name(name)
        if found := _draft_problems(name, spec, report_every, quorum) | terms.problems():
            raise SpecError(found)
        pk = uuid7()
        slug = slugify(name)[:60] or "run"
        own = f"{slug}-{pk.hex[-8:]}"
        if slug in RESERVED_SLUGS or ID.fullmatch(slug) or cls.objects.filter(slug=slug).exists():
            slug = own
        fields = {
            "name": name,
            "draft": dataclasses.asdict(spec),
            "report_every": report_every,
            "quorum": quorum,
        }
        fields |= terms.to_columns() | {"id": pk, "owner": owner, "parent": parent}
        with mirrors.log_transaction():
            try:
                with transaction.atomic():
                    made = cls.objects.create(slug=slug, **fields)
            except IntegrityError:  # another run of this name was made at the same moment
                made = cls.objects.create(slug=own, **fields)
            mirrors.record("run.create", pk, run_events.creation_payload(made))
            record("run.create", made, actor=owner, parent=parent and parent.pk)
        return made

    def edit(self, name: str, spec: RunSpec, *, actor=None) -> bool:
        """While it is the draft that was read, and nobody launched it; else False. A new text needs a new manifest."""
        name = _clean_name(name)
        if found := _draft_problems(name, spec, self.report_every, self.quorum):
            raise SpecError(found)
        before = self.spec
        spec = dataclasses.replace(spec, start=before.start)
        if found := _start_fields_changed(before, spec):
            raise SpecError(found)
        fields = {"name": name, "draft": dataclasses.asdict(spec)}
        if _manifest_inputs(before) != _manifest_inputs(spec):
            fields["manifest"] = None
        return self._decide(
            "edit",
            Q(status=Status.DRAFT, launch_requested=False, draft=self.draft),
            actor=actor,
            **fields,
        )

    def launch(self, *, actor=None) -> bool:
        """The owner is done editing. Training can start as soon as a worker has posted the manifest."""
        return self._decide(
            "launch",
            Q(status=Status.DRAFT, launch_requested=False),
            actor=actor,
            launch_requested=True,
        )

    def pause(self, *, actor=None) -> bool:
        return self._control("pause", actor)

    def resume(self, *, actor=None) -> bool:
        return self._control("resume", actor)

    def cancel(self, *, actor=None) -> bool:
        return self._control("cancel", actor, finished=timezone.now())

    def finish(self, *, actor=None) -> bool:
        """An admin's word that this is it, whatever the budget says."""
        return self._control("finish", actor, finished=timezone.now())

    def extension_problem(self, tokens: int = 1) -> str:
        """Why it cannot get so many tokens more, as a sentence; "" where it can. Once its budget is spent a run is
        never opened again: its machines have agreed on the final weights, and some are gone with them."""
        anew = "Copy the run instead: the copy may begin with this one's weights"
        if self.state is Status.DRAFT:
            return "A draft has its budget in its own form: edit the draft."
        if self.is_over:
            return f"The run is {self.status}, and what is over is never opened again. {anew}."
        if self.ledger_tokens >= self.token_budget:
            return f"Its budget is spent, and its machines are settling the final model. {anew}."
        if not 1 <= tokens <= MAX_TOKEN_BUDGET - self.token_budget:
            return f"Type a number from 1 to {MAX_TOKEN_BUDGET - self.token_budget:,}: no run has more than 10^15 tokens."
        return ""

    def extend(self, tokens: int, *, actor=None) -> None:
        """So many tokens more than it had. The spec stays as it is: workers hear of it with their next directive, and
        train on at the rate where the schedule ends. Raises UserError, with the sentence of `extension_problem`."""
        if sentence := self.extension_problem(tokens):
            raise UserError(sentence)
        under_way = [Status.RECRUITING, Status.TRAINING, Status.PAUSED]
        unchanged = Q(
            status__in=under_way,
            extra_tokens=self.extra_tokens,
            ledger_tokens__lt=self.token_budget,
        )
        with mirrors.log_transaction():
            if not self._change(unchanged, extra_tokens=self.extra_tokens + tokens):
                raise UserError(
                    self.extension_problem(tokens)
                    or "Somebody else extended it just now: look again."
                )
            mirrors.record("run.extend", self.pk, {"tokens": tokens})
            record("run.extend", self, actor=actor, tokens=tokens)

    def update_join_policy(self, terms: JoinPolicy, *, actor=None) -> bool:
        """Who may join with what, and the notes. Raises SpecError, with a sentence for each field; False when nothing
        differs."""
        if found := terms.problems():
            raise SpecError(found)
        columns = terms.to_columns()
        return self._decide("arrange", ~Q(**columns), actor=actor, **columns)

    def clone(self, owner, name: str = "", start: Start | None = None) -> "Run":
        """A draft with the same rules and terms, for somebody to change: what is launched never does. `start`: weights
        of this run that it begins with. Raises SpecError."""
        start = dataclasses.replace(start or self.spec.start, fragments=())
        spec = dataclasses.replace(
            self.spec, roots=(), threshold=1, owner="", manifest="", start=start
        )
        known = {
            "report_every": self.report_every,
            "quorum": self.quorum,
            "terms": self.join_policy,
        }
        return Run.create(owner, name or f"{self.name[:72]} (copy)", spec, parent=self, **known)

    def archive(self, *, actor=None) -> bool:
        """Out of every list; its page stays. Only once it is over."""
        over = Q(status__in=[Status.FINISHED, Status.CANCELLED], archived=None)
        return self._decide("archive", over, actor=actor, archived=timezone.now())

    def unarchive(self, *, actor=None) -> bool:
        return self._decide("unarchive", Q(archived__isnull=False), actor=actor, archived=None)

    def accept_manifest(self, signed: messages.Signed, *, machine=None) -> bool:
        """Only the draft it was checked against takes one, and only the first."""
        open_still = Q(status=Status.DRAFT, manifest__isnull=True, draft=self.draft)
        return self._decide(
            "accept_manifest", open_still, machine=machine, manifest=signed.model_dump()
        )

    def record_ledger_tokens(self, tokens: int) -> None:
        """The ledger only grows."""
        self._change(Q(ledger_tokens__lt=tokens), ledger_tokens=tokens)

    def advance(self, facts: LifecycleFacts) -> bool:
        """One tick. Whether anything changed."""
        before, after = self.state, lifecycle.next_status(self.state, facts)
        if after is before:
            return False
        fields: dict = {"status": after}
        now = timezone.now()
        if after is Status.RECRUITING:
            spec = self._pinned()
            fields |= {
                "spec_text": spec.to_json(),
                "spec_digest": digest(spec.to_json()),
                "launched": now,
            }
        elif after is Status.TRAINING:
            fields["started"] = now
        elif after is Status.FINISHED:
            fields["finished"] = now
        return self._decide(f"becomes_{after}", Q(status=before), **fields)

    def _pinned(self) -> RunSpec:
        signed, spec = messages.Signed.model_validate(self.manifest), self.spec
        start = dataclasses.replace(
            spec.start, fragments=tuple(json.loads(signed.body).get("start", ()))
        )
        return dataclasses.replace(
            spec,
            roots=(site_identity.identity().key,),
            threshold=1,
            owner=signed.key,
            manifest=digest(signed.body),
            start=start,
        )

    def _control(self, action: str, actor, **fields) -> bool:
        allowed, after = lifecycle.TRANSITIONS[action]
        return self._decide(
            action, Q(status__in=[s.value for s in allowed]), actor=actor, status=after, **fields
        )

    def _decide(self, action: str, condition: Q, *, actor=None, machine=None, **fields) -> bool:
        """A change that another mirror has to know of: made, told and noted together, or not at all."""
        with mirrors.log_transaction():
            if changed := self._change(condition, **fields):
                run_events.record_run_event(self, action)
                record(f"run.{action}", self, actor=actor, machine=machine)
        return changed

    def _change(self, condition: Q, **fields) -> bool:
        """One conditional UPDATE settles every race: whoever comes second finds the condition false."""
        changed = Run.objects.filter(condition, pk=self.pk).update(**fields) == 1
        self.refresh_from_db()
        return changed


@lru_cache(maxsize=1000)
def _pinned_budget(spec_text: str) -> int:
    return int(json.loads(spec_text)["recipe"]["token_budget"])


def _clean_name(name: str) -> str:
    """Nothing in a name hides, or turns text around."""
    return " ".join("".join(c if c.isprintable() else " " for c in name).split())


def _start_fields_changed(before: RunSpec, spec: RunSpec) -> dict[str, str]:
    """What a run that begins with another's weights must leave as it is, and does not."""
    if not spec.start.run:
        return {}
    shape, because = dataclasses.asdict(before.model), "this run begins with another's weights"
    found = {
        f"model.{name}": f"must stay {value:,}: {because}"
        for name, value in shape.items()
        if getattr(spec.model, name) != value
    }
    if before.text.tokenizer != spec.text.tokenizer:
        found["text.tokenizer"] = f"must stay {before.text.tokenizer}: {because}"
    return found


def _manifest_inputs(spec: RunSpec) -> tuple:
    """What a manifest was made for, and checked against."""
    return spec.text, spec.model.vocabulary, spec.model.context


def _draft_problems(name: str, spec: RunSpec, report_every: float, quorum: int) -> dict[str, str]:
    found = problems(spec)
    if not 1 <= len(name) <= 80:
        found["name"] = "give the run a name of 1 to 80 characters"
    if not 0.2 <= report_every <= 3600:
        found["report_every"] = "the seconds between two reports must be between 0.2 and 3,600"
    if not 1 <= quorum <= 10_000:
        found["quorum"] = "the machines to wait for must be between 1 and 10,000"
    return found
