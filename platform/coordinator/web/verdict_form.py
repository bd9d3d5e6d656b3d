"""The form that removes updates from a run."""

from typing import Any

from django import forms

from barnraise.errors import SpecError
from coordinator.accounts.models import User
from coordinator.fleet.verdicts import (
    RetractionRequest,
    VerdictRecord,
    list_authors,
    parse_single_updates,
    retraction_problems,
)
from coordinator.runs.models import Run
from coordinator.web.forms import ProblemForm
from coordinator.web.run_form_fields import number_field


class RunVerdictForm(ProblemForm):
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
        authors = [(author.author, str(author)) for author in list_authors(run)]
        self.fields["author"] = forms.ChoiceField(
            choices=authors,
            label="Machine",
            help_text="Numbering restarts when a machine starts from scratch.",
        )
        self.order_fields(["author"])

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

    def save(self, actor: User) -> bool:
        """Issue the verdict; return False, with errors at the fields, if it is refused."""
        values = self.cleaned_data
        try:
            VerdictRecord.issue(self.run, [values["retraction"]], values["reason"], actor=actor)
        except SpecError as error:
            self.add_problems(error)
            return False
        return True
