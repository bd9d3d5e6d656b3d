"""The letters that are not allauth's."""

from django.conf import settings
from django.template.loader import render_to_string

from coordinator.accounts import tasks
from coordinator.accounts.teams import INVITATION_DAYS, TeamInvitation


def send_invitation(made: TeamInvitation, link: str) -> None:
    told = {"made": made, "link": link, "days": INVITATION_DAYS, "site": settings.MIRROR_NAME}
    body = render_to_string("emails/invitation.txt", told)
    tasks.send_email.delay(
        f"{made.by.shown_name} invites you to {made.team.name}", body, made.email
    )
