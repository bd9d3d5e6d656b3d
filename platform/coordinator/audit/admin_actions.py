"""Let staff decide in the admin: a dialog, then the model's own method, which records the decision.

A decision against somebody requires a reason.
"""

from collections.abc import Callable, Collection
from datetime import UTC, datetime
from functools import wraps
from typing import Any, cast

from django import forms
from django.contrib import messages
from django.contrib.admin import display
from django.db.models import IntegerField
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.formats import date_format
from unfold.admin import ModelAdmin
from unfold.decorators import action
from unfold.enums import ActionVariant
from unfold.forms import BaseDialogForm
from unfold.widgets import UnfoldAdminTextareaWidget

from barnraise.formats import format_bytes
from coordinator.lib.exceptions import UserError

# (admin, object, who decides, dialog) → False if nothing changed.
Act = Callable[[Any, Any, Any, Any], bool | None]


class ReasonForm(BaseDialogForm):
    """Ask for the reason of a decision against somebody."""

    reason = forms.CharField(
        max_length=300,
        widget=UnfoldAdminTextareaWidget,
        help_text="The person will see it. It stays in the audit log.",
    )


def decision(
    title: str,
    consequence: str,
    form: type[BaseDialogForm] = BaseDialogForm,
    *,
    done: str,
    otherwise: str = "",
    danger: bool = False,
) -> Callable[[Act], Callable[..., HttpResponse]]:
    """Declare a decision of the staff: a button on an object's page that opens a dialog.

    The declared method receives the object, who decides, and the dialog's form. It returns False if
    it changed nothing.

    Args:
        title: the label of the button, here and in the dialog.
        consequence: what the dialog explains.
        form: what the dialog asks for.
        done: the message for success, a format of the object's `name` and the dialog's `form`.
        otherwise: the message if nothing changed, a format of `name`.
        danger: whether the button warns.
    """

    def declare(act: Act) -> Callable[..., HttpResponse]:
        @wraps(act)
        def decide(self: ModelAdmin, request: HttpRequest, form: Any, object_id: str) -> Any:
            row = self.get_object(request, object_id)
            if row is None:
                raise Http404
            name = str(row)
            try:
                if act(self, row, request.user, form) is False:
                    self.message_user(request, otherwise.format(name=name), messages.WARNING)
                else:
                    message = done.format(name=name, form=form)
                    self.message_user(request, message, messages.SUCCESS)
            except UserError as error:
                self.message_user(request, error.sentence, messages.ERROR)
            page = f"admin:{self.opts.app_label}_{self.opts.model_name}"
            if self.model._default_manager.filter(pk=row.pk).exists():
                return redirect_after(request, reverse(f"{page}_change", args=[object_id]))
            return redirect_after(request, reverse(f"{page}_changelist"))

        return cast(Any, action)(
            description=title,
            permissions=["decide"],
            variant=ActionVariant.DANGER if danger else ActionVariant.DEFAULT,
            dialog={
                "title": title,
                "description": consequence,
                "form_class": form,
                "form_submit_text": title,
            },
        )(decide)

    return declare


class ReadOnlyAdmin(ModelAdmin):
    """Show a model in full, and change it by decisions alone."""

    list_per_page = 25
    show_full_result_count = False  # counting a whole table is slow
    moments: Collection[str] = ()  # integer fields that are milliseconds since 1970

    def get_list_display(self, request: HttpRequest) -> list[Any]:
        """Return the columns; numbers have their thousands."""
        return [self._show_integer(name) for name in super().get_list_display(request)]

    def get_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        """Return the fields of one row; numbers have their thousands."""
        return [self._show_integer(name) for name in super().get_fields(request, obj)]

    def _show_integer(self, name: Any) -> Any:
        """Return what shows a field: for an integer a function that writes 307,200."""
        fields = {field.name: field for field in self.opts.concrete_fields}
        field = fields.get(name)
        if not isinstance(field, IntegerField) or field.primary_key or field.choices:
            return name

        @display(description=field.verbose_name, ordering=name)
        def show(row: Any) -> str:
            value = getattr(row, name)
            if name in self.moments:
                at = datetime.fromtimestamp(value / 1000, UTC) if value else None
                return date_format(at, "DATETIME_FORMAT") if at else "–"
            if value is None:
                return "–"
            return format_bytes(value) if "bytes" in name else f"{value:,}"

        show.__name__ = name
        return show

    def view_on_site(self, obj: Any) -> str | None:
        """Return the page's own address: Django's redirect accepts any text as a key."""
        return obj.get_absolute_url() if hasattr(obj, "get_absolute_url") else None

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Forbid adding."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Forbid editing."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Forbid deleting."""
        return False

    def has_decide_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Allow decisions to those who may change the model."""
        return request.user.has_perm(f"{self.opts.app_label}.change_{self.opts.model_name}")


def redirect_after(request: HttpRequest, url: str) -> HttpResponse:
    """Redirect after a dialog: htmx follows a header, browsers a redirect."""
    if request.headers.get("HX-Request") == "true":
        return HttpResponse(headers={"HX-Redirect": url})
    return HttpResponseRedirect(url)
