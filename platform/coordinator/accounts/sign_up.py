"""Who may create an account: the policy of the staff, applied to a visitor."""

from collections.abc import Callable
from urllib.parse import urlsplit

from django.http import HttpRequest

from coordinator.accounts.site_settings import SiteSettings
from coordinator.accounts.teams import TeamInvitation

TEAM_INVITATION = "/teams/invitations/"
# Each returns whether a path of this site is a valid invitation; apps add theirs when they start.
InvitationCheck = Callable[[str], bool]
invitation_checks: list[InvitationCheck] = []


def is_open_for(request: HttpRequest) -> bool:
    """Return whether this visitor may see the sign-up form."""
    policy = SiteSettings.current().sign_up
    if policy == SiteSettings.SignUp.INVITED:
        return is_invitation(request.POST.get("next") or request.GET.get("next") or "")
    return policy != SiteSettings.SignUp.CLOSED


def is_invitation(address: str) -> bool:
    """Return whether an address leads to a valid invitation of a run or a team."""
    path = urlsplit(address).path
    if path.startswith(TEAM_INVITATION):
        return TeamInvitation.find(path.removeprefix(TEAM_INVITATION).strip("/")) is not None
    return any(check(path) for check in invitation_checks)


def email_problem(email: str) -> str:
    """Return why this address may not sign up, as a sentence; "" if it may."""
    site = SiteSettings.current()
    if site.sign_up != SiteSettings.SignUp.DOMAINS:
        return ""
    if email.rpartition("@")[2].lower() in site.domains:
        return ""
    names = ", ".join(sorted(site.domains))
    return f"Accounts on this site need an email address of {names}."


def closed_sentence() -> str:
    """Return why a visitor cannot create an account, as a sentence."""
    if SiteSettings.current().sign_up == SiteSettings.SignUp.INVITED:
        return (
            "Accounts on this site are for invited people: open the link of your invitation, and "
            "create the account from there."
        )
    return "This site accepts no new accounts at present."
