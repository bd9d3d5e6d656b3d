"""E-mails that allauth does not send."""

from typing import Any

from django.conf import settings
from django.template.loader import render_to_string

from coordinator.accounts import tasks
from coordinator.accounts.teams import INVITATION_DAYS, TeamInvitation


def send_invitation(invitation: TeamInvitation, link: str) -> None:
    """Queue the e-mail that invites somebody into a team; `link` is an absolute URL."""
    context = {
        "made": invitation,
        "link": link,
        "days": INVITATION_DAYS,
        "site": settings.MIRROR_NAME,
    }
    body = render_to_string("emails/invitation.txt", context)
    send_email: Any = tasks.send_email
    send_email.delay(
        f"{invitation.by.shown_name} invites you to {invitation.team.name}", body, invitation.email
    )
