"""Notifications, their settings, and webhooks."""

import uuid

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core import signing
from django.core.paginator import Paginator
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST, require_safe

from coordinator.accounts.models import User
from coordinator.accounts.requests import AuthenticatedRequest
from coordinator.lib.exceptions import UserError
from coordinator.notify.forms import PreferencesForm, WebhookForm, WebhookTypesForm
from coordinator.notify.models import Notification, NotificationPreference, Webhook
from coordinator.notify.notification_types import NotificationType
from coordinator.notify.tasks import UNSUBSCRIBE

PAGE_SIZE = 30  # notifications


@login_required
@require_safe
def list_notifications(request: AuthenticatedRequest) -> HttpResponse:
    """List the person's notifications."""
    pages = Paginator(request.user.notifications.filter(shown=True), PAGE_SIZE)
    page = pages.get_page(request.GET.get("page"))
    return render(request, "notifications.html", {"page": page})


@login_required
@require_POST
def mark_notifications_read(request: AuthenticatedRequest) -> HttpResponse:
    """Mark all notifications as read."""
    Notification.mark_read(request.user)
    return redirect("notifications")


@login_required
def edit_preferences(request: AuthenticatedRequest) -> HttpResponse:
    """Edit where the person wants notifications."""
    form = PreferencesForm(request.POST if request.method == "POST" else None, person=request.user)
    if form.is_valid():
        form.save()
        messages.success(request, "Saved.")
        return redirect("notification_settings")
    return render(request, "notification_settings.html", {"form": form})


@csrf_exempt  # mail programs post here (RFC 8058); the address contains a signed token
def unsubscribe(request: HttpRequest, token: str) -> HttpResponse:
    """Unsubscribe a person from emails by a POST.

    A GET changes nothing, because mail scanners follow links.
    """
    try:
        person = get_object_or_404(User, pk=signing.loads(token, salt=UNSUBSCRIBE), left=None)
    except signing.BadSignature:
        raise Http404 from None
    if request.method == "POST":
        for kind in NotificationType:
            NotificationPreference.set_wanted(person, kind.value, email=False)
        Notification.objects.filter(person=person).update(email_due=None)
    return render(request, "unsubscribe.html", {"done": request.method == "POST"})


@login_required
def list_webhooks(request: AuthenticatedRequest) -> HttpResponse:
    """List the person's webhooks; a POST adds one."""
    form = WebhookForm(request.POST or None)
    if request.method == "POST" and form.is_valid() and form.save(request.user):
        messages.success(request, "Webhook added. Send a test call to try it.")
        return redirect("webhooks")
    return _render_webhooks(request, form)


@login_required
@require_POST
def edit_webhook_types(request: AuthenticatedRequest, pk: uuid.UUID) -> HttpResponse:
    """Change the notification types that a webhook receives."""
    webhook = get_object_or_404(Webhook, pk=pk, person=request.user)
    form = WebhookTypesForm(request.POST, hook=webhook)
    if not form.is_valid():
        return _render_webhooks(request, WebhookForm(), form)
    form.save()
    messages.success(request, "Saved.")
    return redirect("webhooks")


def _render_webhooks(
    request: AuthenticatedRequest, form: WebhookForm, types_form: WebhookTypesForm | None = None
) -> HttpResponse:
    """Render the page with the submitted form, if any."""
    rows: list[tuple[Webhook, WebhookTypesForm]] = []
    for webhook in request.user.webhooks.all():
        if types_form and types_form.hook == webhook:
            rows.append((webhook, types_form))
        else:
            rows.append((webhook, WebhookTypesForm(hook=webhook)))
    status = 422 if form.is_bound or types_form else 200
    return render(request, "webhooks.html", {"form": form, "rows": rows}, status=status)


@login_required
@require_POST
def control_webhook(request: AuthenticatedRequest, pk: uuid.UUID, action: str) -> HttpResponse:
    """Remove, test, enable or disable a webhook."""
    webhook = get_object_or_404(Webhook, pk=pk, person=request.user)
    if action == "remove":
        webhook.remove()
        messages.success(request, "Webhook removed.")
    elif action == "test":
        try:
            webhook.create_test_delivery()
            messages.success(
                request, "A test call was queued; reload in a few seconds to see the response."
            )
        except UserError as error:
            messages.error(request, str(error))
    elif action in ("on", "off"):
        webhook.set_active(action == "on")
        messages.success(request, "Webhook enabled." if action == "on" else "Webhook disabled.")
    else:
        raise Http404
    return redirect("webhooks")
