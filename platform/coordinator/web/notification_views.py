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
from coordinator.notify.forms import ChoicesForm, KindsForm, WebhookForm
from coordinator.notify.models import Choice, Notice, Webhook
from coordinator.notify.notification_types import Kind
from coordinator.notify.tasks import UNSUBSCRIBE

PAGE = 30  # notices


@login_required
@require_safe
def notices(request: HttpRequest) -> HttpResponse:
    page = Paginator(request.user.notices.filter(shown=True), PAGE).get_page(
        request.GET.get("page")
    )
    return render(request, "notices.html", {"page": page})


@login_required
@require_POST
def notices_read(request: HttpRequest) -> HttpResponse:
    Notice.mark_read(request.user)
    return redirect("notices")


@login_required
def choices(request: HttpRequest) -> HttpResponse:
    form = ChoicesForm(request.POST if request.method == "POST" else None, person=request.user)
    if form.is_valid():
        form.save()
        messages.success(request, "Saved.")
        return redirect("choices")
    return render(request, "choices.html", {"form": form})


@csrf_exempt  # mail programs post here by themselves (RFC 8058): the address holds a secret of its own
def unsubscribe(request: HttpRequest, token: str) -> HttpResponse:
    """No more letters. Looking at the page changes nothing: mail scanners follow links."""
    try:
        person = get_object_or_404(User, pk=signing.loads(token, salt=UNSUBSCRIBE), left=None)
    except signing.BadSignature:
        raise Http404 from None
    if request.method == "POST":
        for kind in Kind:
            Choice.choose(person, kind.value, email=False)
        Notice.objects.filter(person=person).update(email_due=None)
    return render(request, "unsubscribe.html", {"done": request.method == "POST"})


@login_required
def webhooks(request: HttpRequest) -> HttpResponse:
    form = WebhookForm(request.POST or None)
    if request.method == "POST" and form.is_valid() and form.save(request.user):
        messages.success(request, "Added. Try it with a test call.")
        return redirect("webhooks")
    return _webhooks(request, form)


@login_required
@require_POST
def webhook_kinds(request: HttpRequest, webhook: uuid.UUID) -> HttpResponse:
    """Of what one hears."""
    form = KindsForm(request.POST, hook=get_object_or_404(Webhook, pk=webhook, person=request.user))
    if not form.is_valid():
        return _webhooks(request, WebhookForm(), form)
    form.save()
    messages.success(request, "Saved.")
    return redirect("webhooks")


def _webhooks(
    request: HttpRequest, form: WebhookForm, changed: KindsForm | None = None
) -> HttpResponse:
    """The page, with what was typed into either of its forms."""
    rows = [
        (hook, changed if changed and changed.hook == hook else KindsForm(hook=hook))
        for hook in request.user.webhooks.all()
    ]
    status = 422 if form.is_bound or changed else 200
    return render(request, "webhooks.html", {"form": form, "rows": rows}, status=status)


@login_required
@require_POST
def webhook_control(request: HttpRequest, webhook: uuid.UUID, action: str) -> HttpResponse:
    hook = get_object_or_404(Webhook, pk=webhook, person=request.user)
    if action == "remove":
        hook.remove()
        messages.success(request, "The webhook is gone.")
    elif action == "test":
        hook.owe(None, {"greeting": "Hello from Barnraise."})
        messages.success(request, "A test call is on its way; look here again in some seconds.")
    elif action in ("on", "off"):
        hook.switch(action == "on")
        messages.success(request, f"The webhook is {action}.")
    else:
        raise Http404
    return redirect("webhooks")
