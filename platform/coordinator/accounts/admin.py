"""People and machines for the staff."""

from django.contrib import admin, messages
from django.contrib.auth.admin import UserAdmin as DjangoUserAdmin
from django.contrib.auth.models import Group
from unfold.admin import ModelAdmin
from unfold.forms import AdminPasswordChangeForm, UserChangeForm, UserCreationForm

from coordinator.accounts.models import Enrolment, Machine, User

admin.site.unregister(Group)


@admin.register(User)
class UserAdmin(DjangoUserAdmin, ModelAdmin):
    form, add_form, change_password_form = UserChangeForm, UserCreationForm, AdminPasswordChangeForm
    list_display = ["email", "name", "is_staff", "is_active", "date_joined"]
    list_filter = ["is_staff", "is_active"]
    search_fields = ["email", "name"]
    ordering = ["email"]
    readonly_fields = ["last_login", "date_joined"]
    filter_horizontal = []
    fieldsets = [
        (None, {"fields": ["email", "password", "name"]}),
        ("May", {"fields": ["is_active", "is_staff", "is_superuser", "user_permissions"]}),
        ("When", {"fields": ["last_login", "date_joined"]}),
    ]
    add_fieldsets = [(None, {"fields": ["email", "name", "password1", "password2"]})]


@admin.register(Machine)
class MachineAdmin(ModelAdmin):
    list_display = ["name", "owner", "system", "cores", "enrolled", "last_seen", "revoked"]
    list_filter = ["revoked"]
    search_fields = ["hostname", "key", "owner__email"]
    list_select_related = ["owner"]
    actions = ["revoke"]

    def has_add_permission(self, request) -> bool:
        return False  # a machine enrols itself

    def get_readonly_fields(self, request, obj=None):
        return [field.name for field in Machine._meta.fields]

    @admin.action(description="Revoke: refuse these machines from now on", permissions=["change"])
    def revoke(self, request, queryset) -> None:
        done = sum(machine.revoke() for machine in queryset)
        self.message_user(request, f"Revoked {done} of {len(queryset)} machines.", messages.SUCCESS)


@admin.register(Enrolment)
class EnrolmentAdmin(ModelAdmin):
    list_display = ["code", "decision", "decided_by", "created", "expires"]
    list_filter = ["decision"]

    def has_add_permission(self, request) -> bool:
        return False

    def has_change_permission(self, request, obj=None) -> bool:
        return False
