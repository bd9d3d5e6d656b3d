"""Which machine is in which run, for the staff to look at."""

from django.contrib import admin

from coordinator.audit.decisions import Looked
from coordinator.fleet.models import Membership


@admin.register(Membership)
class MembershipAdmin(Looked):
    list_display = ["machine", "run", "activity", "last_seen", "tokens", "mark"]
    list_filter = ["activity", "run"]
    search_fields = ["machine__hostname", "machine__key", "run__name", "run__slug"]
    list_select_related = ["machine", "run"]
