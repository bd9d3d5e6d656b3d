"""Which machine is in which run, for the staff to look at."""

from django.contrib import admin
from unfold.admin import ModelAdmin

from coordinator.fleet.models import Membership


@admin.register(Membership)
class MembershipAdmin(ModelAdmin):
    list_display = ["machine", "run", "activity", "last_seen", "tokens", "mark"]
    list_filter = ["activity", "run"]
    list_select_related = ["machine", "run"]

    def has_add_permission(self, request) -> bool:
        return False

    def has_change_permission(self, request, obj=None) -> bool:
        return False
