"""Announcements, written by the staff."""

from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from unfold.admin import ModelAdmin
from unfold.decorators import action

from coordinator.audit.admin_actions import ReadOnlyAdmin, dialog_options
from coordinator.staff.models import Announcement


@admin.register(Announcement)
class AnnouncementAdmin(ModelAdmin):
    list_display = ["text", "tone", "starts", "ends", "by"]
    list_filter = ["tone"]
    search_fields = ["text"]
    list_select_related = ["by"]
    actions_detail = ["withdraw"]
    has_delete_permission = (
        ReadOnlyAdmin.has_delete_permission
    )  # withdrawn, not deleted: what was said was said
    has_decide_permission = ReadOnlyAdmin.has_decide_permission
    decide = ReadOnlyAdmin.decide

    def save_model(self, request: HttpRequest, obj: Announcement, form, change: bool) -> None:
        obj.publish(request.user)

    @action(
        description="Withdraw",
        permissions=["decide"],
        dialog=dialog_options("Withdraw", "It is shown no more."),
    )
    def withdraw(self, request: HttpRequest, form, object_id: str) -> HttpResponse:
        return self.decide(
            request,
            object_id,
            lambda said: said.withdraw(request.user),
            "Withdrawn.",
            "It was over already.",
        )
