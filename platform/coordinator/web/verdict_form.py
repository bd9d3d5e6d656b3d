"""The form that takes updates out of a run again."""

from typing import Any

from django import forms

from barnraise.errors import SpecError
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
    """Of one machine: everything from a number on, or single updates, or both."""

    author = forms.ChoiceField(
        label="Whose updates", help_text="Each of its lives numbers its updates anew."
    )
    first = number_field(
        "From this update on",
        "All of them come out, and nothing more is taken of it. 1: every one.",
        "",
    )
    updates = forms.CharField(
        required=False,
        max_length=4000,
        label="Or single updates",
        help_text="Numbers, with commas. With its tokens, like 7:40960, one leaves the run's count as well.",
        widget=forms.TextInput(attrs={"autocomplete": "off"}),
    )
    reason = forms.CharField(
        required=False, max_length=100, label="Why", help_text="Everybody may read it.",
        widget=forms.TextInput(attrs={"autocomplete": "off"}),
    )  # fmt: skip

    def __init__(self, *args, run: Run, **kwargs):
        super().__init__(*args, **kwargs)
        self.run = run
        self.fields["author"].choices = [(each.author, str(each)) for each in list_authors(run)]

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean()
        if "author" not in cleaned:
            return cleaned
        try:
            first = self.parse_number("first", int, 0) if cleaned.get("first") else None
            cleaned["charge"] = RetractionRequest(
                cleaned["author"], first, parse_single_updates(cleaned.get("updates") or "")
            )
        except SpecError as error:
            self.add_problems(error)
            return cleaned
        if not self.errors:
            self.add_problems(SpecError(retraction_problems(self.run, [cleaned["charge"]])))
        return cleaned

    def save(self, actor) -> bool:
        """False when the run has changed meanwhile: what is wrong is then at the fields."""
        try:
            VerdictRecord.issue(
                self.run, [self.cleaned_data["charge"]], self.cleaned_data["reason"], actor=actor
            )
        except SpecError as error:
            self.add_problems(error)
            return False
        return True
