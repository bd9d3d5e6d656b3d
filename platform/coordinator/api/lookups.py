"""What an authenticated request may see: its user or machine, its runs, its memberships."""

from collections.abc import Callable
from typing import Any, cast
from uuid import UUID

from django.db.models import QuerySet
from django.http import HttpRequest

from coordinator.accounts.models import Machine, User
from coordinator.api.authentication import ApiError
from coordinator.fleet.models import Membership
from coordinator.fleet.report_queries import membership_for_run
from coordinator.fleet.verdict_models import exclusion_problem
from coordinator.runs.models import Run
from coordinator.tokens.models import Token

PAGE = 50


def get_credential(request: HttpRequest) -> Any:
    """Return what Ninja's authenticator returned: a machine, a token or a mirror's key."""
    return cast(Any, request).auth


def requesting_machine(request: HttpRequest) -> Machine:
    """Return the machine that signed the request."""
    return get_credential(request)


def requesting_user(request: HttpRequest) -> User:
    """Return the owner of the request's token."""
    return get_credential(request).user


def visible_runs(request: HttpRequest) -> Any:
    """Return a queryset of the runs that the machine or the token's owner may see."""
    credential = get_credential(request)
    if isinstance(credential, Token):
        return Run.objects.visible_to(credential.user)
    return Run.objects.visible_to_machine(credential)


def listed_runs(request: HttpRequest) -> Any:
    """Return a queryset of the runs that a list shows to the machine or the token's owner."""
    credential = get_credential(request)
    if isinstance(credential, Token):
        return Run.objects.listed_for(credential.user)
    return visible_runs(request).listed_for(credential.owner)


def get_visible_run(request: HttpRequest, name: str) -> Run:
    """Return a visible run by its id or slug.

    Raises:
        ApiError: There is none.
    """
    run = visible_runs(request).find(name)
    if run is None:
        raise ApiError(
            404,
            f"there is no run '{name[:60]}' here, or you are not invited to it: "
            "`barnraise runs` lists yours",
        )
    return run


def get_owned_run(request: HttpRequest, name: str) -> Run:
    """Return a run that the token's owner may control, by its id or slug.

    Raises:
        ApiError: There is none, or it belongs to somebody else.
    """
    run = get_visible_run(request, name)
    if not run.may_control(requesting_user(request)):
        raise ApiError(403, "only the run's owner can do this")
    return run


def require_membership(request: HttpRequest, name: str) -> Membership:
    """Return the requesting machine's membership in the run of this id or slug.

    Raises:
        ApiError: The machine has not joined it, or a verdict excludes it.
    """
    machine = requesting_machine(request)
    membership = membership_for_run(machine, name)
    if membership is None:
        run = get_visible_run(request, name)
        raise ApiError(403, f"this machine is not in the run {run.name}: join it first")
    if membership.has_verdicts:
        problem = exclusion_problem(membership.run, machine.key, machine.owner_id)
        if problem:
            raise ApiError(403, problem)
    return membership


def paginate(
    rows: QuerySet[Any], cursor: Callable[[Any], UUID], page_size: int | None = None
) -> tuple[list[Any], UUID | None]:
    """Return (the first rows, the cursor of the last of them if there are more)."""
    page_size = page_size or PAGE
    page = list(rows[: page_size + 1])
    following = cursor(page[page_size - 1]) if len(page) > page_size else None
    return page[:page_size], following
