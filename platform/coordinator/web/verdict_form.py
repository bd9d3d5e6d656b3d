"""The forms that remove updates from a run and exclude a volunteer from it."""

from typing import Any, cast

from django import forms

from barnraise.errors import SpecError
from coordinator.accounts.models import User
from coordinator.fleet.marked_names import list_keys, mark_name
from coordinator.fleet.run_authors import list_authors
from coordinator.fleet.verdict_models import VerdictRecord
from coordinator.fleet.verdict_requests import (
    ExclusionRequest,
    RetractionRequest,
    parse_single_updates,
    retraction_problems,
)
from coordinator.runs.models import Run
from coordinator.web.forms import ProblemForm
from coordinator.web.run_form_fields import number_field


class SignedDecisionForm(ProblemForm):
    """A verdict on a run, with its public reason."""

    reason = forms.CharField(
        required=False,
        max_length=100,
        label="Reason",
        help_text="Public.",
        widget=forms.TextInput(attrs={"autocomplete": "off"}),
    )

    def __init__(self, *args: Any, run: Run, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.run = run

    def save(self, actor: User) -> bool:
        """Issue the verdict; return False, with errors at the fields, if it is refused."""
        retractions, exclusions = self.build_requests()
        reason = self.cleaned_data["reason"]
        try:
            VerdictRecord.issue(self.run, retractions, reason, exclude=exclusions, actor=actor)
        except SpecError as error:
            self.add_problems(error)
            return False
        return True

    def build_requests(self) -> tuple[list[RetractionRequest], list[ExclusionRequest]]:
        """Return what a valid form retracts, and whom it excludes."""
        raise NotImplementedError


class RunVerdictForm(SignedDecisionForm):
    """Updates of one machine: all from a number on, single ones, or both."""

    first = number_field(
        "First update", "Removes this update and all later ones; 1 removes all.", ""
    )
    updates = forms.CharField(
        required=False,
        max_length=4000,
        label="Single updates",
        help_text="Numbers, separated by commas; 7:40960 also subtracts its tokens from the count.",
        widget=forms.TextInput(attrs={"autocomplete": "off"}),
    )
    field_order = ["author", "first", "updates", "reason"]

    def __init__(self, *args: Any, run: Run, **kwargs: Any) -> None:
        super().__init__(*args, run=run, **kwargs)
        authors = [(author.author, str(author)) for author in list_authors(run)]
        self.fields["author"] = forms.ChoiceField(
            choices=authors,
            label="Machine",
            help_text="Numbering restarts when a machine starts from scratch.",
        )
        self.order_fields(self.field_order)

    def clean(self) -> dict[str, Any]:
        """Check what is to be removed."""
        cleaned = super().clean()
        if "author" not in cleaned:
            return cleaned
        first = self.parse_number("first", 0) if cleaned.get("first") else None
        try:
            updates = parse_single_updates(cleaned.get("updates") or "")
        except SpecError as error:
            self.add_problems(error)
            return cleaned
        retraction = RetractionRequest(cleaned["author"], first, updates)
        if not self.errors:
            self.add_problems(SpecError(retraction_problems(self.run, [retraction])))
        return {**cleaned, "retraction": retraction}

    def build_requests(self) -> tuple[list[RetractionRequest], list[ExclusionRequest]]:
        """Return the updates of one machine."""
        return [self.cleaned_data["retraction"]], []


class ExcludeForm(SignedDecisionForm):
    """A volunteer to exclude from a run, and whether their updates are removed."""

    person = forms.ModelChoiceField(
        User.objects.none(),
        label="Volunteer",
        empty_label="Choose a volunteer",
        help_text="All of their machines are excluded, those that they enrol later included.",
    )
    updates = forms.ChoiceField(
        choices=[("remove", "Remove"), ("keep", "Keep")],
        initial="remove",
        widget=forms.RadioSelect,
        label="Their updates",
        help_text="Updates older than the verdict horizon stay in any case.",
    )
    afterwards = forms.ChoiceField(
        required=False,
        choices=[
            ("train-on", "Train on"),
            ("begin-again", "Begin again from the weights before them"),
        ],
        initial="train-on",
        widget=forms.RadioSelect,
        label="The run",
        help_text=(
            "Removed updates leave behind what others learnt from them. To begin again pauses this "
            "run, and creates a draft from its newest checkpoint from before they joined."
        ),
    )
    field_order = ["person", "updates", "afterwards", "reason"]

    def __init__(self, *args: Any, run: Run, **kwargs: Any) -> None:
        super().__init__(*args, run=run, **kwargs)
        field = cast("forms.ModelChoiceField", self.fields["person"])
        members = run.memberships.exclude(machine__owner=run.owner_id)
        field.queryset = User.objects.filter(
            pk__in=members.values("machine__owner"), left=None
        ).order_by("name", "pk")
        keys = list_keys(run)
        field.label_from_instance = lambda obj: mark_name(cast("User", obj), keys)

    def build_requests(self) -> tuple[list[RetractionRequest], list[ExclusionRequest]]:
        """Return the volunteer."""
        values = self.cleaned_data
        return [], [ExclusionRequest(values["person"], values["updates"] == "remove")]
