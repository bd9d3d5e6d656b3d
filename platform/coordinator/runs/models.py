"""A run: one model being trained, its owner, and its lifecycle."""

import dataclasses
import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote
from uuid import UUID

from django.conf import settings
from django.db import IntegrityError, models, transaction
from django.db.models import Q
from django.utils import timezone
from uuid6 import uuid7

from barnraise.errors import SpecError
from barnraise.protocol import coordinator_messages, enums, messages
from barnraise.protocol.mirror_list import quorum
from barnraise.protocol.signing import digest
from barnraise.spec import ModelSpec, RunSpec, Start, adopt_model
from coordinator.audit.log import record
from coordinator.eventlog import writer
from coordinator.lib.exceptions import UserError
from coordinator.replication import mirror_list
from coordinator.runs import lifecycle
from coordinator.runs.drafts import (
    NewRun,
    choose_slug,
    clean_name,
    draft_problems,
    start_problems,
    unique_slug,
)
from coordinator.runs.invitations import Guest as Guest
from coordinator.runs.invitations import RunInvitation as RunInvitation
from coordinator.runs.join_policy import Access, JoinPolicy, Visibility
from coordinator.runs.lifecycle import LifecycleFacts
from coordinator.runs.published_texts import PublishedText as PublishedText
from coordinator.runs.querysets import RunQuerySet
from coordinator.runs.replicated import run_events
from coordinator.runs.strategy_choice import resolve_strategy, restore_auto

Status = enums.RunStatus
MAX_TOKEN_BUDGET = 10**15


class Run(models.Model):
    """A run.

    `draft` is the spec as the owner last wrote it. The launch completes it (mirrors' keys, the
    manifest and its signer) and stores it as `spec_text`, exact bytes that never change again.
    """

    if TYPE_CHECKING:
        owner_id: UUID
        parent_id: UUID | None
        team_id: UUID | None
        memberships: Any
        verdicts: Any
        checkpoints: Any
        samples: Any
        scores: Any
        credits: Any
        guests: Any
        invitations: Any

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
    manifest = models.JSONField(null=True, blank=True, editable=False)  # a `messages.Signed`
    quorum = models.PositiveIntegerField(
        "machines to start with",
        default=1,
        help_text="Training starts when this many machines are alive.",
    )
    report_every = models.FloatField(
        "report interval", default=10.0, help_text="Seconds between a machine's reports."
    )
    ledger_tokens = models.BigIntegerField("tokens trained", default=0, editable=False)
    ledger_people = models.PositiveIntegerField(
        "people who vouch for them", default=0, db_default=0, editable=False
    )
    # Tokens that were added to the spec's budget.
    extra_tokens = models.BigIntegerField("added tokens", default=0, editable=False)
    created = models.DateTimeField(default=timezone.now, editable=False)
    launched = models.DateTimeField(null=True, editable=False)
    started = models.DateTimeField(null=True, editable=False)
    finished = models.DateTimeField(null=True, editable=False)
    archived = models.DateTimeField(null=True, editable=False)  # in no list, but still at its URL
    parent = models.ForeignKey(
        "self",
        null=True,
        editable=False,
        on_delete=models.SET_NULL,
        related_name="copies",
        verbose_name="copied from",
    )
    access = models.CharField("who may join", max_length=12, choices=Access, default=Access.ANYONE)
    min_memory = models.BigIntegerField("minimum RAM", default=0, help_text="Bytes; 0 for any.")
    min_device_memory = models.BigIntegerField(
        "minimum GPU memory", default=0, help_text="Bytes; 0 for any."
    )
    visibility = models.CharField(
        "who may see it", max_length=10, choices=Visibility, default=Visibility.PUBLIC
    )
    notes = models.TextField(blank=True)
    team = models.ForeignKey(
        "accounts.Team", null=True, on_delete=models.SET_NULL, related_name="runs"
    )

    objects: ClassVar[Any] = RunQuerySet.as_manager()

    class Meta:
        ordering = ["-created"]
        indexes = [models.Index(fields=["status"])]

    def __str__(self) -> str:
        return self.name

    def get_absolute_url(self) -> str:
        """Return the path of the run's page."""
        return f"/runs/{quote(self.slug)}/"

    # ---- what it is --------------------------------------------------------------------------

    @property
    def state(self) -> Status:
        """The status as an enum."""
        return Status(self.status)

    @property
    def spec(self) -> RunSpec:
        """The spec: the final one, or the draft with the vocabulary of its prepared text."""
        if self.spec_text:
            return RunSpec.from_json(self.spec_text, is_stored=True)
        spec = self.draft_spec
        if self.manifest is None:
            return spec
        vocabulary = int(json.loads(self.manifest["body"])["vocabulary"])
        return dataclasses.replace(
            spec, model=dataclasses.replace(spec.model, vocabulary=vocabulary)
        )

    @property
    def draft_spec(self) -> RunSpec:
        """The spec as its owner wrote it: the text may have fewer tokens than asked for."""
        return RunSpec.from_json(json.dumps(self.draft), is_stored=True)

    @property
    def token_budget(self) -> int:
        """The tokens to train, read without parsing the whole spec."""
        if self.spec_text:
            budget = _pinned_budget(self.spec_text)
        else:
            budget = int(self.draft["recipe"]["token_budget"])
        return budget + self.extra_tokens

    @property
    def max_plausible_tokens(self) -> int:
        """The bound on token counts in reports.

        A loss measured later than that is wrong, and would squeeze all others into a corner of
        the chart.
        """
        return 2 * max(self.ledger_tokens, self.token_budget)

    @property
    def is_over(self) -> bool:
        """Whether it is finished or cancelled."""
        return self.state in (Status.FINISHED, Status.CANCELLED)

    @property
    def is_launching(self) -> bool:
        """Whether it is a draft that its owner has launched: it waits for its text."""
        return self.launch_requested and self.state is Status.DRAFT

    @property
    def is_editable(self) -> bool:
        """Whether it is a draft that its owner has not launched."""
        return self.state is Status.DRAFT and not self.launch_requested

    def to_message(self) -> coordinator_messages.RunView:
        """Return the run as workers receive it."""
        signed = messages.Signed.model_validate(self.manifest) if self.manifest else None
        spec = self.spec_text or RunSpec.to_json(self.spec)
        return coordinator_messages.RunView(
            id=str(self.pk),
            slug=self.slug,
            name=self.name,
            status=self.state,
            launching=self.is_launching,
            spec=spec,
            manifest=signed,
        )

    @property
    def join_policy(self) -> JoinPolicy:
        """Who may join, with what, and the notes."""
        return JoinPolicy(
            self.access,
            self.min_memory,
            self.min_device_memory,
            self.notes,
            self.team_id,
            self.visibility,
        )

    # ---- who may do what ---------------------------------------------------------------------

    def may_see(self, user: Any) -> bool:
        """Return whether this person may see the run."""
        if self.is_public or self.may_control(user):
            return True
        return Run.objects.visible_to(user).filter(pk=self.pk).exists()

    @property
    def is_public(self) -> bool:
        """Whether everybody who has its address may see it."""
        return bool(self.spec_text) and self.visibility != Visibility.INVITED

    def may_control(self, user: Any) -> bool:
        """Return whether this person may edit, launch, pause, resume or cancel it."""
        if not getattr(user, "is_active", False):
            return False
        return self.owner_id == user.pk or user.acts_as_staff

    def accepts_machines_of(self, user: Any) -> bool:
        """Return whether this person's machines may join, whatever their hardware."""
        if self.access == Access.ANYONE or self.owner_id == user.pk:
            return True
        if self.access == Access.TEAM:
            return bool(self.team_id) and user.teams.filter(pk=self.team_id).exists()
        return self.guests.filter(user=user).exists()

    def standing_of(self, user: Any) -> enums.Standing:
        """Return what the owner knows of a person, which their tickets say."""
        if self.owner_id == user.pk:
            return enums.Standing.OWNER
        is_member = self.access == Access.TEAM and self.accepts_machines_of(user)
        if is_member or self.guests.filter(user=user).exists():
            return enums.Standing.INVITED
        return enums.Standing.STRANGER

    @property
    def access_description(self) -> str:
        """Whose machines may join, to follow the run's name in a sentence."""
        if self.access == Access.TEAM:
            if self.team:
                return f"takes the machines of the team {self.team}"
            return "takes the machines of a team that was deleted"
        if self.access == Access.ANYONE:
            return "takes anybody's machines"
        return "takes the machines of invited people"

    # ---- what happens to it ------------------------------------------------------------------

    @classmethod
    def create(cls, owner: Any, new: NewRun) -> "Run":
        """Create a draft, which the owner may edit and control.

        Raises:
            SpecError: with a sentence for each field that is not valid.
        """
        field_problems = new.problems()
        if field_problems:
            raise SpecError(field_problems)
        pk = uuid7()
        columns = {"id": pk, "owner": owner, **new.to_columns()}
        slug = choose_slug(columns["name"], pk, cls.objects.all())
        with writer.log_transaction():
            try:
                with transaction.atomic():
                    run = cls.objects.create(slug=slug, **columns)
            except IntegrityError:  # another run of this name was created at the same moment
                run = cls.objects.create(slug=unique_slug(columns["name"], pk), **columns)
            writer.record("run.create", pk, run_events.creation_payload(run))
            record("run.create", run, actor=owner, parent=new.parent and new.parent.pk)
        return run

    def edit(self, name: str, spec: RunSpec, *, actor: Any = None) -> bool:
        """Change name and spec of a draft; a new text needs a new manifest.

        The address follows the name: before its launch only the owner and the staff have seen it.

        Returns:
            False if the draft was changed since it was read, or launched.

        Raises:
            SpecError: with a sentence for each field that is not valid.
        """
        name = clean_name(name)
        field_problems = draft_problems(name, spec, self.report_every, self.quorum)
        if field_problems:
            raise SpecError(field_problems)
        before = self.draft_spec
        if before.start.run:
            spec = dataclasses.replace(spec, start=before.start)
        field_problems = start_problems(before, spec)
        if field_problems:
            raise SpecError(field_problems)
        draft = dataclasses.asdict(spec)
        columns: dict[str, Any] = {"name": name, "draft": draft}
        manifest_inputs = run_events.manifest_inputs
        if manifest_inputs(dataclasses.asdict(before)) != manifest_inputs(draft):
            columns["manifest"] = None
        if name != self.name:
            columns["slug"] = choose_slug(name, self.pk, Run.objects.all())
        unchanged = Q(status=Status.DRAFT, launch_requested=False, draft=self.draft)
        try:
            with transaction.atomic():
                return self._decide("edit", unchanged, actor=actor, **columns)
        except IntegrityError:  # another run of this name was created at the same moment
            columns["slug"] = unique_slug(name, self.pk)
            return self._decide("edit", unchanged, actor=actor, **columns)

    def launch(self, *, actor: Any = None) -> bool:
        """End editing: training can start once a worker has posted the manifest."""
        editable = Q(status=Status.DRAFT, launch_requested=False)
        return self._decide("launch", editable, actor=actor, launch_requested=True)

    def pause(self, *, actor: Any = None) -> bool:
        """Stop all workers' steps until `resume`; False if the run is not training."""
        return self._control("pause", actor)

    def resume(self, *, actor: Any = None) -> bool:
        """Let workers continue; False if the run is not paused."""
        return self._control("resume", actor)

    def cancel(self, *, actor: Any = None) -> bool:
        """Give the run up; False if it is over."""
        return self._control("cancel", actor, finished=timezone.now())

    def finish(self, *, actor: Any = None) -> bool:
        """Finish the run whatever its budget; False if it cannot be finished now."""
        return self._control("finish", actor, finished=timezone.now())

    def extension_problem(self, tokens: int = 1) -> str:
        """Return why the budget cannot grow by so many tokens, as a sentence; "" if it can.

        A run whose budget is spent is never reopened: its machines have agreed on the final
        weights, and some have left with them.
        """
        advice = "Copy the run instead: the copy may begin with this one's weights"
        if self.state is Status.DRAFT:
            return "A draft has its budget in its own form: edit the draft."
        if self.is_over:
            return f"The run is {self.status}, and a run that is over cannot be reopened. {advice}."
        if self.ledger_tokens >= self.token_budget:
            return (
                f"Its budget is spent, and its machines are agreeing on the final model. {advice}."
            )
        max_tokens = MAX_TOKEN_BUDGET - self.token_budget
        if not 1 <= tokens <= max_tokens:
            return f"Type a number from 1 to {max_tokens:,}: no run has more than 10^15 tokens."
        return ""

    def extend(self, tokens: int, *, actor: Any = None) -> None:
        """Add tokens to the budget.

        The spec stays as it is: workers receive the budget with their next directive, and continue
        with the learning rate at which the schedule ends.

        Raises:
            UserError: with the sentence of `extension_problem`.
        """
        problem = self.extension_problem(tokens)
        if problem:
            raise UserError(problem)
        unchanged = Q(
            status__in=[Status.RECRUITING, Status.TRAINING, Status.PAUSED],
            extra_tokens=self.extra_tokens,
            ledger_tokens__lt=self.token_budget,
        )
        with writer.log_transaction():
            if not self._change(unchanged, extra_tokens=self.extra_tokens + tokens):
                raise UserError(
                    self.extension_problem(tokens)
                    or "Somebody else extended it just now: look again."
                )
            writer.record("run.extend", self.pk, {"tokens": tokens})
            record("run.extend", self, actor=actor, tokens=tokens)

    def update_join_policy(self, policy: JoinPolicy, *, actor: Any = None) -> bool:
        """Change who may join, with what, and the notes; False if nothing differs.

        Raises:
            SpecError: with a sentence for each field that is not valid.
        """
        field_problems = policy.problems()
        if field_problems:
            raise SpecError(field_problems)
        columns = policy.to_columns()
        return self._decide("set_join_policy", ~Q(**columns), actor=actor, **columns)

    def clone(self, owner: Any, name: str = "", start: Start | None = None) -> "Run":
        """Create a draft with the same spec and, as far as it suits the owner, join policy.

        A team that the owner is not in stays behind: nobody can join such a copy before its owner
        has invited them. Notes are copied for their author only.

        Args:
            owner: whose the draft is.
            name: what it is called; "" for this run's name and "(copy)".
            start: weights that the copy begins with; None for those that this run began with.

        Raises:
            SpecError: with a sentence for each field that is not valid.
        """
        start = dataclasses.replace(start or self.spec.start, fragments=())
        spec = dataclasses.replace(
            restore_auto(self.spec), roots=(), threshold=1, owner="", manifest="", start=start
        )
        copy = NewRun(
            name or f"{self.name[:72]} (copy)",
            spec,
            parent=self,
            report_every=self.report_every,
            quorum=self.quorum,
            join_policy=self._policy_for_copy(owner),
        )
        return Run.create(owner, copy)

    def _policy_for_copy(self, owner: Any) -> JoinPolicy:
        policy = self.join_policy
        if owner.pk != self.owner_id:
            policy = dataclasses.replace(policy, notes="")
        in_team = bool(self.team_id) and owner.teams.filter(pk=self.team_id).exists()
        if policy.access == Access.TEAM and not in_team:
            policy = dataclasses.replace(policy, access=Access.INVITATION, team=None)
        return policy

    def archive(self, *, actor: Any = None) -> bool:
        """Remove a run that is over from every list; its page stays."""
        over = Q(status__in=[Status.FINISHED, Status.CANCELLED], archived=None)
        return self._decide("archive", over, actor=actor, archived=timezone.now())

    def unarchive(self, *, actor: Any = None) -> bool:
        """Return a run to the lists."""
        return self._decide("unarchive", Q(archived__isnull=False), actor=actor, archived=None)

    def accept_manifest(self, signed: messages.Signed, *, machine: Any = None) -> bool:
        """Store the manifest that a worker posted.

        Only the draft that the manifest was checked against accepts one, and only the first.
        """
        unchanged = Q(status=Status.DRAFT, manifest__isnull=True, draft=self.draft)
        return self._decide(
            "accept_manifest", unchanged, machine=machine, manifest=signed.model_dump()
        )

    def discard_text(self, *, machine: Any = None) -> bool:
        """Forget the prepared text of a draft, so that another one can take its place.

        Returns:
            False if there is none, or the run is launched: machines train on its text then.
        """
        prepared = Q(status=Status.DRAFT, manifest__isnull=False)
        return self._decide("discard_text", prepared, machine=machine, manifest=None)

    def record_ledger_tokens(self, tokens: int, people: int = 1) -> None:
        """Store how many tokens the ledger has, and how many people vouch for that."""
        self._change(Q(), ledger_tokens=tokens, ledger_people=people)

    def advance(self, facts: LifecycleFacts) -> bool:
        """Move the run at most one status on; return whether it changed."""
        before = self.state
        after = lifecycle.next_status(before, facts)
        if after is before:
            return False
        columns: dict[str, Any] = {"status": after}
        now = timezone.now()
        if after is Status.RECRUITING:
            spec_text = self._final_spec().to_json()
            columns["spec_text"] = spec_text
            columns["spec_digest"] = digest(spec_text)
            columns["launched"] = now
        elif after is Status.TRAINING:
            columns["started"] = now
        elif after is Status.FINISHED:
            columns["finished"] = now
        return self._decide(f"status_{after}", Q(status=before), **columns)

    def _final_spec(self) -> RunSpec:
        """Complete the draft's spec with the mirrors' keys, the manifest and its signer.

        What binds all machines needs half of these mirrors' signatures.
        """
        roots = mirror_list.launch_roots()
        signed = messages.Signed.model_validate(self.manifest)
        spec = self.spec
        manifest = coordinator_messages.TextManifest.model_validate_json(signed.body)
        if manifest.model:  # of a Hugging Face model, which only the owner's machine has read
            spec = adopt_model(spec, ModelSpec(**manifest.model.model_dump()))
        spec = resolve_strategy(spec, is_open=self.access == Access.ANYONE)
        return dataclasses.replace(
            spec,
            roots=roots,
            threshold=quorum(len(roots)),
            owner=signed.key,
            manifest=digest(signed.body),
            start=dataclasses.replace(spec.start, fragments=tuple(manifest.start)),
        )

    def _control(self, action: str, actor: Any, **columns: Any) -> bool:
        allowed, after = lifecycle.TRANSITIONS[action]
        condition = Q(status__in=[status.value for status in allowed])
        return self._decide(action, condition, actor=actor, status=after, **columns)

    def _decide(
        self, action: str, condition: Q, *, actor: Any = None, machine: Any = None, **columns: Any
    ) -> bool:
        """Change columns and record the event and the audit entry, all together or not at all."""
        with writer.log_transaction():
            changed = self._change(condition, **columns)
            if changed:
                run_events.record_run_event(self, action)
                record(f"run.{action}", self, actor=actor, machine=machine)
        return changed

    def _change(self, condition: Q, **columns: Any) -> bool:
        """Change columns by one conditional UPDATE; of two racing changes only one succeeds."""
        changed = Run.objects.filter(condition, pk=self.pk).update(**columns) == 1
        self.refresh_from_db()
        return changed


@lru_cache(maxsize=1000)
def _pinned_budget(spec_text: str) -> int:
    return int(json.loads(spec_text)["recipe"]["token_budget"])
