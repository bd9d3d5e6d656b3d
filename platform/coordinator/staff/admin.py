"""The admin of announcements."""

from typing import Any, cast

from django.contrib import admin
from django.http import HttpRequest
from unfold.admin import ModelAdmin

from coordinator.accounts.models import User
from coordinator.audit.admin_actions import ReadOnlyAdmin, decision
from coordinator.staff.models import Announcement


@admin.register(Announcement)
class AnnouncementAdmin(ModelAdmin):
    """Announcements are published and withdrawn, never deleted."""

    list_display = ["text", "tone", "starts", "ends", "by"]
    list_filter = ["tone"]
    search_fields = ["text"]
    list_select_related = ["by"]
    actions_detail = ["withdraw"]
    has_delete_permission = ReadOnlyAdmin.has_delete_permission
    has_decide_permission = ReadOnlyAdmin.has_decide_permission

    def save_model(self, request: HttpRequest, obj: Announcement, form: Any, change: bool) -> None:
        """Publish the announcement by its model's method."""
        obj.publish(cast(User, request.user))

    @decision(
        "Withdraw",
        "It is no longer shown.",
        done="Withdrawn.",
        otherwise="It had ended already.",
    )
    def withdraw(self, announcement: Announcement, actor: Any, form: Any) -> bool:
        """Stop showing an announcement."""
        return announcement.withdraw(actor)
