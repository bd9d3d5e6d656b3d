"""What a person was told, what they want to be told, and their webhooks."""

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
from coordinator.notify.forms import PreferencesForm, WebhookForm, WebhookTypesForm
from coordinator.notify.models import Notification, NotificationPreference, Webhook
from coordinator.notify.notification_types import NotificationType
from coordinator.notify.tasks import UNSUBSCRIBE

PAGE = 30  # notices


@login_required
@require_safe
def list_notifications(request: HttpRequest) -> HttpResponse:
    page = Paginator(request.user.notifications.filter(shown=True), PAGE).get_page(
        request.GET.get("page")
    )
    return render(request, "notifications.html", {"page": page})


@login_required
@require_POST
def mark_notifications_read(request: HttpRequest) -> HttpResponse:
    Notification.mark_read(request.user)
    return redirect("notifications")


@login_required
def edit_preferences(request: HttpRequest) -> HttpResponse:
    form = PreferencesForm(request.POST if request.method == "POST" else None, person=request.user)
    if form.is_valid():
        form.save()
        messages.success(request, "Saved.")
        return redirect("notification_settings")
    return render(request, "notification_settings.html", {"form": form})


@csrf_exempt  # mail programs post here by themselves (RFC 8058): the address holds a secret of its own
def unsubscribe(request: HttpRequest, token: str) -> HttpResponse:
    """No more letters. Looking at the page changes nothing: mail scanners follow links."""
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
def list_webhooks(request: HttpRequest) -> HttpResponse:
    form = WebhookForm(request.POST or None)
    if request.method == "POST" and form.is_valid() and form.save(request.user):
        messages.success(request, "Added. Try it with a test call.")
        return redirect("webhooks")
    return _render_webhooks(request, form)


@login_required
@require_POST
def edit_webhook_types(request: HttpRequest, webhook: uuid.UUID) -> HttpResponse:
    """Of what one hears."""
    form = WebhookTypesForm(
        request.POST, hook=get_object_or_404(Webhook, pk=webhook, person=request.user)
    )
    if not form.is_valid():
        return _render_webhooks(request, WebhookForm(), form)
    form.save()
    messages.success(request, "Saved.")
    return redirect("webhooks")


def _render_webhooks(
    request: HttpRequest, form: WebhookForm, changed: WebhookTypesForm | None = None
) -> HttpResponse:
    """The page, with what was typed into either of its forms."""
    rows = [
        (hook, changed if changed and changed.hook == hook else WebhookTypesForm(hook=hook))
        for hook in request.user.webhooks.all()
    ]
    status = 422 if form.is_bound or changed else 200
    return render(request, "webhooks.html", {"form": form, "rows": rows}, status=status)


@login_required
@require_POST
def control_webhook(request: HttpRequest, webhook: uuid.UUID, action: str) -> HttpResponse:
    hook = get_object_or_404(Webhook, pk=webhook, person=request.user)
    if action == "remove":
        hook.remove()
        messages.success(request, "The webhook is gone.")
    elif action == "test":
        hook.create_delivery(None, {"greeting": "Hello from Barnraise."})
        messages.success(request, "A test call is on its way; look here again in some seconds.")
    elif action in ("on", "off"):
        hook.set_active(action == "on")
        messages.success(request, f"The webhook is {action}.")
    else:
        raise Http404
    return redirect("webhooks")
