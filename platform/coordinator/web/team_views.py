"""Pages of teams and of invitations to them."""

from uuid import UUID

from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import PermissionDenied
from django.db.models import Count
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_POST, require_safe

from coordinator.accounts import emails
from coordinator.accounts.forms import TeamForm, TeamInvitationForm
from coordinator.accounts.models import Team, TeamInvitation, User, UserError
from coordinator.accounts.requests import AuthenticatedRequest
from coordinator.credit import progress

MAX_TEAMS = 200  # on one page


@require_safe
def list_teams(request: HttpRequest) -> HttpResponse:
    """List all teams, the visitor's first."""
    teams = Team.objects.annotate(size=Count("members"))
    own_teams = Team.objects.none()
    if isinstance(request.user, User):
        own_teams = teams.filter(pk__in=request.user.teams.all())
    context = {"own_teams": own_teams, "teams": teams.order_by("-size", "name")[:MAX_TEAMS]}
    return render(request, "teams.html", context)


@login_required
def create_team(request: AuthenticatedRequest) -> HttpResponse:
    """Create a team."""
    form = TeamForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        try:
            return redirect(Team.create(form.cleaned_data["name"], request.user))
        except UserError as error:
            form.add_error("name", error.sentence)
    return render(request, "team_new.html", {"form": form}, status=422 if form.is_bound else 200)


@require_safe
def show_team(request: HttpRequest, slug: str) -> HttpResponse:
    """Show a team."""
    return _render_team(request, get_object_or_404(Team, slug=slug))


@login_required
@require_POST
def rename_team(request: AuthenticatedRequest, slug: str) -> HttpResponse:
    """Rename a team."""
    team = get_led_team(request, slug)
    form = TeamForm(request.POST, auto_id="id_rename_%s")
    if form.is_valid():
        try:
            team.rename(form.cleaned_data["name"], request.user)
            return redirect(team)
        except UserError as error:
            form.add_error("name", error.sentence)
    return _render_team(request, team, rename=form)


@login_required
@require_POST
def invite_member(request: AuthenticatedRequest, slug: str) -> HttpResponse:
    """Invite an email address; the page does not reveal whether it has an account."""
    team = get_led_team(request, slug)
    form = TeamInvitationForm(request.POST, auto_id="id_invite_%s")
    if form.is_valid():
        try:
            invitation, token = TeamInvitation.send(team, form.cleaned_data["email"], request.user)
        except UserError as error:
            form.add_error("email", error.sentence)
        else:
            emails.send_invitation(invitation, f"{settings.SITE_URL}/teams/invitations/{token}/")
            messages.success(request, f"An invitation was sent to {invitation.email}.")
            return redirect(team)
    return _render_team(request, team, invite=form)


@login_required
@require_POST
def withdraw_invitation(request: AuthenticatedRequest, slug: str) -> HttpResponse:
    """Revoke an invitation to a team."""
    team = get_led_team(request, slug)
    get_object_or_404(team.invitations, pk=_submitted_id(request)).withdraw(request.user)
    return redirect(team)


@login_required
@require_POST
def leave_team(request: AuthenticatedRequest, slug: str) -> HttpResponse:
    """Leave the team, or remove the member with `id`."""
    team = get_object_or_404(Team, slug=slug)
    if "id" in request.POST:
        membership = get_object_or_404(team.members, pk=_submitted_id(request))
    else:
        membership = get_object_or_404(team.members, person=request.user)
    person = membership.person
    if person != request.user and not team.may_lead(request.user):
        raise PermissionDenied("Only a leader of the team can do this.")
    if team.remove_member(person, request.user):
        subject = "You have" if person == request.user else f"{person.shown_name} has"
        messages.success(request, f"{subject} left {team.name}.")
    return redirect("teams" if person == request.user else team)


@login_required
@require_POST
def promote_member(request: AuthenticatedRequest, slug: str) -> HttpResponse:
    """Make a member a leader."""
    team = get_led_team(request, slug)
    person = get_object_or_404(team.members, pk=_submitted_id(request)).person
    if team.promote(person, request.user):
        messages.success(request, f"{person.shown_name} is now a leader of {team.name}.")
    return redirect(team)


def answer_invitation(request: HttpRequest, token: str) -> HttpResponse:
    """Show an invitation to a team, to visitors as well; a POST accepts or declines it."""
    invitation = TeamInvitation.find(token)
    if invitation is None:
        return render(request, "team_invitation.html", {"invitation": None}, status=404)
    refusal = ""
    if request.method == "POST" and not isinstance(request.user, User):
        return redirect_to_login(request.get_full_path())
    if request.method == "POST":
        try:
            if request.POST.get("answer") == "join":
                invitation.accept(request.user)
                messages.success(request, f"You joined {invitation.team.name}.")
                return redirect(invitation.team)
            invitation.withdraw(request.user)
            messages.success(request, "Invitation declined.")
            return redirect("teams")
        except UserError as error:
            refusal = error.sentence
    context = {"invitation": invitation, "refusal": refusal}
    return render(request, "team_invitation.html", context, status=409 if refusal else 200)


def get_led_team(request: HttpRequest, slug: str) -> Team:
    """Return a team that the visitor leads; raise Http404 or PermissionDenied otherwise."""
    team = get_object_or_404(Team, slug=slug)
    if not team.may_lead(request.user):
        raise PermissionDenied("Only a leader of the team can do this.")
    return team


def _render_team(
    request: HttpRequest,
    team: Team,
    rename: TeamForm | None = None,
    invite: TeamInvitationForm | None = None,
) -> HttpResponse:
    may_lead = team.may_lead(request.user)
    by_day = progress.tokens_by_day(progress.credit_of_team(team))
    shares = progress.member_shares(team)
    members = team.members.select_related("person").annotate(machines=Count("person__machines"))
    context = {
        "team": team,
        "members": members,
        "by_day": by_day,
        "shares": shares,
        "total": sum(share.tokens for share in shares),
        "may_lead": may_lead,
        "is_member": request.user.is_authenticated
        and team.members.filter(person=request.user).exists(),
        "invitations": team.invitations.all() if may_lead else [],
        "rename": rename or TeamForm(initial={"name": team.name}, auto_id="id_rename_%s"),
        "invite": invite or TeamInvitationForm(auto_id="id_invite_%s"),
    }
    return render(request, "team.html", context, status=422 if rename or invite else 200)


def _submitted_id(request: AuthenticatedRequest) -> UUID:
    """Parse the `id` of a submitted form; raise Http404 if it is none."""
    try:
        return UUID(request.POST.get("id", ""))
    except ValueError:
        raise Http404 from None
