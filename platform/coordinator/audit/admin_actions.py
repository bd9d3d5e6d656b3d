"""How the admin decides: a dialog, with a reason where one is due, then the model's own method, which notes it."""

from collections.abc import Callable
from typing import Any

from django import forms
from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from unfold.admin import ModelAdmin
from unfold.forms import BaseDialogForm
from unfold.widgets import UnfoldAdminTextareaWidget

from coordinator.lib.exceptions import UserError


class ReasonForm(BaseDialogForm):
    """Asked for where a decision is against somebody."""

    reason = forms.CharField(
        max_length=300,
        widget=UnfoldAdminTextareaWidget,
        help_text="They are told. It stays in the audit log.",
    )


def dialog_options(
    title: str, description: str, form: type[BaseDialogForm] = BaseDialogForm, submit: str = ""
) -> dict[str, Any]:
    """A dialog for unfold's `action`."""
    return {
        "title": title,
        "description": description,
        "form_class": form,
        "form_submit_text": submit or title,
    }


class ReadOnlyAdmin(ModelAdmin):
    """Looked at in full; changed by decisions alone."""

    list_per_page = 25
    show_full_result_count = False  # of what a search leaves out; lists are long

    def view_on_site(self, obj: Any) -> str | None:
        """Straight there: Django's own detour takes any text for a key."""
        return obj.get_absolute_url() if hasattr(obj, "get_absolute_url") else None

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_decide_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return request.user.has_perm(f"{self.opts.app_label}.change_{self.opts.model_name}")

    def decide(
        self,
        request: HttpRequest,
        pk: str,
        act: Callable[[Any], bool | None],
        done: str,
        otherwise: str = "",
    ) -> HttpResponse:
        """`act` on the one with this key, say how that went, and back to it. False: `otherwise`."""
        found = self.get_object(request, pk)
        if found is None:
            raise Http404
        name = str(found)
        try:
            changed = act(found) is not False
            level, text = (messages.SUCCESS, done) if changed else (messages.WARNING, otherwise)
            self.message_user(request, text.format(name=name), level)
        except UserError as error:
            self.message_user(request, error.sentence, messages.ERROR)
        place = f"admin:{self.opts.app_label}_{self.opts.model_name}"
        still = self.model._default_manager.filter(pk=found.pk).exists()
        return redirect_after(
            request,
            reverse(f"{place}_change", args=[pk]) if still else reverse(f"{place}_changelist"),
        )


def redirect_after(request: HttpRequest, url: str) -> HttpResponse:
    """htmx follows a header out of its dialog; everybody else a redirect."""
    if request.headers.get("HX-Request") == "true":
        return HttpResponse(headers={"HX-Redirect": url})
    return HttpResponseRedirect(url)
