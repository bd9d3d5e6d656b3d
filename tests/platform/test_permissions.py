"""Check what each role may do on each route of the site, by a table that must be complete."""

import re
import time
from collections.abc import Iterator, Sequence
from functools import cache
from types import SimpleNamespace

import pytest
from django.conf import settings as site_settings
from django.contrib import admin
from django.core import signing
from django.db import transaction
from django.http import HttpResponse
from django.test import Client
from django.test.client import ClientHandler
from django.urls import get_resolver, resolve
from helpers.effort import EXHAUSTIVE
from helpers.site.enrolment_requests import enrolment_request

from barnraise.protocol.signing import Identity
from coordinator.accounts.models import Enrolment, SiteSettings, Team, TeamInvitation
from coordinator.audit.models import AuditEntry
from coordinator.eventlog.models import ForkProof, Origin
from coordinator.fleet.verdict_models import VerdictRecord
from coordinator.fleet.verdict_requests import RetractionRequest
from coordinator.lib import heartbeats
from coordinator.notify.models import Webhook
from coordinator.notify.tasks import UNSUBSCRIBE
from coordinator.runs import models as runs
from coordinator.staff.models import Announcement
from coordinator.tokens.models import Token

pytestmark = pytest.mark.django_db

ROLES = ("visitor", "volunteer", "organiser", "owner", "staff")
ALL = "200 200 200 200 200"
SIGNED_IN = "login 200 200 200 200"  # any signed-in person
VISITORS = "200 home home home home"
STAFF = "login login login login 200"  # the admin's login refuses everybody else
FORBIDDEN = "login login login login 403"

# Method and path → the outcome for each of ROLES. A number is a status. "login" redirects to the
# login page, "prove" asks for the password again, "done" does it and redirects, "home" redirects
# because the page makes no sense in this state.
TABLE = {
    # pages
    "GET /": ALL,
    "GET /runs/": ALL,
    "GET /mirrors/": ALL,
    "GET /docs/": ALL,
    "GET /docs/people.md": ALL,
    "GET /licence/": ALL,
    "GET /download/": ALL,
    "GET /download/barnraise-0.0.0-py3-none-any.whl": "404 404 404 404 404",
    "GET /runs/new/": "login 403 200 200 200",
    "POST /runs/new/ name=Dawn&preset=gpt-nano": "login 403 done done done",
    "POST /runs/estimate/ preset=gpt-nano": SIGNED_IN,
    "GET /runs/{run}/": ALL,
    "GET /runs/{draft}/": "404 404 404 200 200",
    "GET /runs/{draft}/edit/": "login 404 404 200 200",
    "GET /runs/{run}/edit/": "login 403 403 home home",
    "POST /runs/{draft}/launch/": "login 404 404 done done",
    "POST /runs/{run}/pause/": "login 403 403 done done",
    "POST /runs/{run}/resume/": "login 403 403 done done",
    "POST /runs/{run}/cancel/": "login 403 403 done done",
    "POST /runs/{run}/finish/": "login 403 403 done done",
    "GET /runs/{run}/fits/": ALL,
    "GET /runs/{draft}/fits/": "404 404 404 200 200",
    "GET /runs/{run}/checkpoints/": ALL,
    "GET /runs/{run}/events/": ALL,
    "GET /runs/{draft}/events/": "404 404 404 200 200",
    "GET /runs/{run}/checklist/": "login 403 403 200 200",
    "GET /runs/{draft}/checklist/": "login 404 404 200 200",
    "GET /runs/{draft}/checkpoints/": "404 404 404 200 200",
    "GET /runs/{run}/terms/": "login 403 403 200 200",
    "GET /runs/{draft}/terms/": "login 404 404 200 200",
    "GET /runs/{run}/verdicts/": "login 403 403 200 200",
    "POST /runs/{run}/verdicts/ author={author}&first=3&reason=noise": "login 403 403 done done",
    "POST /runs/{draft}/verdicts/ author={author}&first=3": "login 404 404 422 422",
    "POST /runs/{run}/verdicts/{verdict}/sign/": "login 403 403 done done",
    "POST /runs/{draft}/verdicts/{verdict}/sign/": "login 404 404 404 404",
    "GET /runs/{run}/exclude/": "login 403 403 200 200",
    "POST /runs/{run}/exclude/ person=nobody&updates=remove": "login 403 403 422 422",
    "GET /runs/{draft}/exclude/": "login 404 404 200 200",
    "POST /runs/{run}/clear/ person=nobody": "login 403 403 404 404",
    "POST /runs/{draft}/clear/ person=nobody": "login 404 404 404 404",
    "GET /runs/{run}/extend/": "login 403 403 200 200",
    "POST /runs/{run}/extend/ tokens=0": "login 403 403 422 422",
    "POST /runs/{run}/terms/ access=anyone": "login 403 403 done done",
    "POST /runs/{run}/archive/": "login 403 403 done done",
    "POST /runs/{run}/unarchive/": "login 403 403 done done",
    "GET /runs/{run}/clone/": "login 405 405 405 405",
    "POST /runs/{run}/clone/": "login 403 done done done",
    "POST /runs/{draft}/clone/": "login 404 404 done done",
    "POST /runs/{run}/invitations/ note=Bob": "login 403 403 done done",
    "POST /runs/{run}/invitations/{link}/": "login 403 403 done done",
    "GET /runs/{run}/invited/{bid}/": ALL,
    "POST /runs/{run}/invited/{bid}/": "login done done done done",
    "GET /runs/{run}/invited/wrong/": "404 404 404 404 404",
    "GET /live/{run_id}/": ALL,
    "GET /live/{draft_id}/": "404 404 404 200 200",
    "GET /live/{run_id}/machines/": ALL,
    "GET /live/{draft_id}/machines/": "404 404 404 200 200",
    "GET /live/{run_id}/swarm/": ALL,
    "GET /live/{draft_id}/swarm/": "404 404 404 200 200",
    "GET /runs/compare/?run={run}": ALL,
    "GET /machines/": SIGNED_IN,
    "GET /machines/enrol/": SIGNED_IN,
    "GET /machines/enrol/{code}/": SIGNED_IN,
    "POST /machines/enrol/{code}/ answer=approve": SIGNED_IN,
    "GET /machines/{machine}/": "login 404 404 200 404",
    "GET /machines/{machine}/history/": "login 404 404 200 404",
    "GET /machines/{machine}/certificate/": "home home home home home",
    "POST /machines/{machine}/ name=Attic": "login 404 404 done 404",
    "POST /machines/{machine}/pause/": "login 404 404 done 404",
    "POST /machines/{machine}/resume/": "login 404 404 done 404",
    "POST /machines/{machine}/confirm/": "login 404 404 done 404",
    "POST /machines/{machine}/revoke/": "login 404 404 done 404",
    "GET /account/": SIGNED_IN,
    "POST /account/ name=Newname": "login done done done done",
    "GET /account/delete/": "login prove prove prove prove",
    "POST /account/delete/ email=x": "login prove prove prove prove",
    "GET /credit/?by=teams&period=week": ALL,
    "GET /volunteers/{owner_id}/": "404 404 404 200 404",
    "GET /volunteers/{owner_id}/card.png": "404 404 404 404 404",
    "GET /runs/{run}/card.png": ALL,
    "GET /runs/{draft}/card.png": "404 404 404 404 404",
    "GET /account/tokens/": SIGNED_IN,
    "POST /account/tokens/ name=x&days=30&scopes=runs:read": SIGNED_IN,
    "POST /account/tokens/{personal}/": "login 404 404 done 404",
    "GET /teams/": ALL,
    "GET /teams/new/": SIGNED_IN,
    "POST /teams/new/ name=Smiths": "login done done done done",
    "GET /teams/{team}/": ALL,
    "POST /teams/{team}/rename/ name=Spinners": "login 403 403 done 403",
    "POST /teams/{team}/invite/ email=new@example.org": "login 403 403 done 403",
    "POST /teams/{team}/withdraw-invitation/ id={invitation}": "login 403 403 done 403",
    "POST /teams/{team}/promote/ id={place}": "login 403 403 done 403",
    "POST /teams/{team}/leave/ id={place}": "login 403 403 done 403",
    "POST /teams/{team}/leave/": "login 404 404 done 404",
    "GET /teams/invitations/{token}/": ALL,
    "POST /teams/invitations/{token}/ answer=join": "login done done done done",
    "GET /teams/invitations/wrong/": "404 404 404 404 404",
    "GET /notifications/": SIGNED_IN,
    "POST /notifications/read/": "login done done done done",
    "GET /notifications/settings/": SIGNED_IN,
    "POST /notifications/settings/": "login done done done done",
    "GET /notifications/webhooks/": SIGNED_IN,
    "POST /notifications/webhooks/ url=https://10.0.0.1/&kinds=run.started": (
        "login 422 422 422 422"
    ),
    "POST /notifications/webhooks/{hook}/kinds/ kinds=run.started": "login 404 404 done 404",
    "POST /notifications/webhooks/{hook}/off/": "login 404 404 done 404",
    "POST /notifications/webhooks/{hook}/test/": "login 404 404 done 404",
    "POST /notifications/webhooks/{hook}/remove/": "login 404 404 done 404",
    "GET /notifications/unsubscribe/{off}/": ALL,
    "POST /notifications/unsubscribe/{off}/": ALL,
    "GET /notifications/unsubscribe/wrong/": "404 404 404 404 404",
    # allauth
    "GET /accounts/login/": VISITORS,
    "GET /accounts/signup/": VISITORS,
    "GET /accounts/inactive/": ALL,
    "GET /accounts/logout/": "home 200 200 200 200",
    "GET /accounts/reauthenticate/": SIGNED_IN,
    "GET /accounts/email/": SIGNED_IN,
    "GET /accounts/confirm-email/": "login home home home home",
    "GET /accounts/login/code/": VISITORS,
    "GET /accounts/login/code/confirm/": "login home home home home",
    "GET /accounts/password/change/": SIGNED_IN,
    "GET /accounts/password/set/": "login home home home home",
    "GET /accounts/password/reset/": ALL,
    "GET /accounts/password/reset/done/": ALL,
    "GET /accounts/password/reset/key/done/": ALL,
    "GET /accounts/password/reset/key/1-x/": ALL,
    "GET /accounts/sessions/": SIGNED_IN,
    "GET /accounts/2fa/": SIGNED_IN,
    "GET /accounts/2fa/authenticate/": "login home home home home",
    "GET /accounts/2fa/reauthenticate/": "login prove prove prove 200",
    "GET /accounts/2fa/totp/activate/": "login prove prove prove prove",
    "GET /accounts/2fa/totp/deactivate/": "login 404 404 404 prove",
    "GET /accounts/2fa/recovery-codes/": "login 404 404 404 404",
    "GET /accounts/2fa/recovery-codes/generate/": "login prove prove prove prove",
    "GET /accounts/2fa/recovery-codes/download/": "login 404 404 404 404",
    "GET /accounts/2fa/webauthn/": SIGNED_IN,
    "GET /accounts/2fa/webauthn/add/": "login prove prove prove prove",
    "GET /accounts/2fa/webauthn/reauthenticate/": "login prove prove prove prove",
    "GET /accounts/2fa/webauthn/keys/1/remove/": "login prove prove prove prove",
    "GET /accounts/2fa/webauthn/keys/1/edit/": "login prove prove prove prove",
    "GET /accounts/2fa/webauthn/login/": "login home home home home",
    # the API, from a browser's session; machines are in test_requests
    # of the API, what scripts call by a token: test_api has their table
    # for those who run the site
    "GET /healthz": ALL,
    "GET /readyz": ALL,
    "GET /metrics": ALL,
    "GET /status": ALL,
    "GET /api/v1/openapi.json": ALL,
    "GET /api/v1/docs": ALL,
    "GET /api/v1/": "404 404 404 404 404",
    "GET /api/v1/mirror": ALL,
    "GET /api/v1/mirrors/list": ALL,
    "POST /api/v1/enrolments": "422 422 422 422 422",
    "GET /api/v1/enrolments/{code}": ALL,
    # the admin
    "GET /admin/": STAFF,
    "GET /admin/figures/": STAFF,
    "POST /admin/test-letter/": "login login login login done",
    "GET /admin/search/?s=run": STAFF,
    "GET /admin/login/": "login 403 403 403 home",
    "POST /admin/logout/": "done done done done done",
    "GET /admin/password_change/": STAFF,
    "GET /admin/password_change/done/": STAFF,
    "GET /admin/autocomplete/": FORBIDDEN,
    "GET /admin/jsi18n/": STAFF,
    "GET /admin/r/1/1/": "404 404 404 404 404",
    "GET /admin/accounts/": STAFF,
    "GET /admin/nonsense": "login login login login 404",
}
ACTION_FORM = "_form_submitted=1&reason=because&tokens=1000&first=5"
ADMIN_ACTIONS = {  # each has a dialog to look at, and a POST that acts
    "accounts/user/{person}": ["make_organiser", "remove_organiser", "ban", "unban", "erase"],
    "accounts/machine/{machine}": ["revoke", "reinstate"],
    "accounts/team/{team_id}": ["disband"],
    "runs/run/{run_id}": ["pause", "resume", "extend", "finish", "cancel"],
    "fleet/membership/{membership}": ["remove_updates"],
    "staff/announcement/{announcement}": ["withdraw"],
}
for row, actions in ADMIN_ACTIONS.items():
    for action in actions:
        TABLE[f"GET /admin/{row}/{action}/"] = STAFF
        TABLE[f"POST /admin/{row}/{action}/ {ACTION_FORM}"] = "login login login login done"
for action in ("make_staff", "remove_staff"):  # answered with a refusal: only superusers may
    TABLE[f"POST /admin/accounts/user/{{person}}/{action}/ {ACTION_FORM}"] = (
        "login login login login done"
    )
VIEWED_MODELS = {  # model → a row of it
    "audit/auditentry": "{entry}",
    "accounts/user": "{person}",
    "accounts/machine": "{machine}",
    "accounts/enrolment": "{code}",
    "accounts/team": "{team_id}",
    "accounts/sitesettings": "{rules}",
    "runs/run": "{run_id}",
    "fleet/membership": "{membership}",
    "fleet/verdictrecord": "{verdict}",
    "staff/announcement": "{announcement}",
    "eventlog/origin": "{origin}",
    "eventlog/forkproof": "{proof}",
}
# Hidden behind another route, which has a row.
HIDDEN_ROUTES = {"admin/r/<path:content_type_id>/<path:object_id>/"}
# Their forms save through a method of the model.
EDITED_MODELS = {"staff/announcement", "accounts/sitesettings"}
for model, row in VIEWED_MODELS.items():
    TABLE |= {
        f"GET /admin/{model}/": STAFF,
        f"GET /admin/{model}/add/": STAFF if model == "staff/announcement" else FORBIDDEN,
        f"GET /admin/{model}/{row}/": "login login login login home",
        f"GET /admin/{model}/{row}/change/": STAFF,
        f"POST /admin/{model}/{row}/change/": STAFF if model in EDITED_MODELS else FORBIDDEN,
        f"GET /admin/{model}/{row}/history/": STAFF,
        f"POST /admin/{model}/{row}/delete/ post=yes": FORBIDDEN,
    }
THIRD_PARTY_MODELS = [
    f"django_celery_beat/{kind}"
    for kind in (
        "periodictask",
        "clockedschedule",
        "crontabschedule",
        "solarschedule",
        "intervalschedule",
    )
]
for model in THIRD_PARTY_MODELS:  # for superusers only
    for page in ("", "add/", "1/change/", "1/delete/"):
        TABLE[f"GET /admin/{model}/{page}"] = FORBIDDEN
    TABLE[f"GET /admin/{model}/1/history/"] = "login login login login home"
    TABLE[f"GET /admin/{model}/1/"] = "login login login login home"


@pytest.fixture
def populated_site(valkey, person, launched_run, draft, settings) -> SimpleNamespace:
    """Create a person of each role, and one of everything that belongs to the owner."""
    for part in heartbeats.Part:  # which advance for as long as the test lasts
        valkey.hset(heartbeats.KEY, part.value, time.time() + 3600)
    settings.OUTSIDE_NETWORKS = []
    people = {
        name: person(f"{name}@example.org", name=name.title()) for name in ("volunteer", "guest")
    }
    people["organiser"] = person("organiser@example.org", organiser=True)
    people["owner"] = person("owner@example.org", organiser=True)
    people["staff"] = person("staff@example.org", is_staff=True)
    owner = people["owner"]
    SiteSettings.set_organisers("granted", people["staff"])
    run, machine = launched_run(owner, name="Dusk")
    run.memberships.update(incarnation="a" * 16, updates_by_incarnation={"a" * 16: 4})
    author = f"{machine.identity.key}.{'a' * 16}"
    verdict = VerdictRecord.issue(run, [RetractionRequest(author, 9)], "noise", actor=owner)
    team = Team.create("Weavers", owner)
    team.add_member(people["guest"], owner)
    invitation, token = TeamInvitation.send(team, "somebody@example.org", owner)
    request = enrolment_request(Identity(b"w" * 32))
    hook = Webhook.objects.create(
        person=owner, url="https://example.org/", secret="whsec_AAAA", kinds=[]
    )
    announcement = Announcement(text="Hello")
    announcement.publish(people["staff"])
    link = runs.RunInvitation.create(run, actor=owner)
    log = Origin.objects.get()
    signed = {"key": log.key, "body": "{}", "signature": "0" * 128}
    proof = ForkProof.objects.create(origin=log, seq=1, first=signed, second=signed)
    personal, _ = Token.create(owner, "script", ["runs:read"], 30)

    names = {
        "origin": log.pk,
        "proof": proof.pk,
        "author": author,
        "verdict": verdict.pk,
        "link": link.pk,
        "bid": link.token,
        "personal": personal.pk,
        "owner_id": owner.pk,
        "run": run.slug,
        "run_id": run.pk,
        "machine": machine.machine.pk,
        "team": team.slug,
        "team_id": team.pk,
        "invitation": invitation.pk,
        "token": token,
        "place": team.members.get(person=people["guest"]).pk,
        "code": Enrolment.open(request).code,
        "hook": hook.pk,
        "announcement": announcement.pk,
        "person": people["guest"].pk,
        "off": signing.dumps(str(owner.pk), salt=UNSUBSCRIBE),
        "entry": AuditEntry.objects.first().pk,
        "membership": run.memberships.get().pk,
        "rules": SiteSettings.objects.get().pk,
    }
    unlaunched = draft(owner, name="Dawn draft")
    names |= {"draft": unlaunched.slug, "draft_id": unlaunched.pk}
    sessions = {role: open_session(people[role]) for role in ROLES if role in people}
    return SimpleNamespace(sessions=sessions, names=names)


def open_session(person) -> str:
    """Sign a person in, and return the session's cookie."""
    client = Client()
    client.force_login(person)
    return client.cookies[site_settings.SESSION_COOKIE_NAME].value


@cache
def create_handler(enforce_csrf_checks: bool) -> ClientHandler:
    """Return what answers the requests of many clients; each would load all middleware again."""
    return ClientHandler(enforce_csrf_checks)


def client_as(populated_site: SimpleNamespace, role: str, enforces_csrf: bool = False) -> Client:
    """Return a new client with the session of a role."""
    client = Client()
    client.handler = create_handler(enforces_csrf)
    if role != "visitor":
        client.cookies[site_settings.SESSION_COOKIE_NAME] = populated_site.sessions[role]
    return client


def send_as(
    populated_site: SimpleNamespace, role: str, request: str, enforces_csrf: bool = False
) -> HttpResponse:
    """Send a request of the table in a role."""
    client = client_as(populated_site, role, enforces_csrf)
    method, path, *body = request.format(**populated_site.names).split(" ")
    form = "application/json" if path.startswith("/api/") else "application/x-www-form-urlencoded"
    return client.generic(method, path, body[0] if body else "", content_type=form)


def describe_outcome(request: str, answer: HttpResponse) -> str:
    """Return the outcome in the table's words."""
    if answer.status_code != 302:
        return str(answer.status_code)
    target = answer["Location"]
    if target.startswith(("/accounts/login", "/admin/login")):
        return "login"
    if target.startswith(("/accounts/reauthenticate", "/accounts/2fa/reauthenticate")):
        return "prove"
    return "done" if request.startswith("POST ") else "home"


def test_each_route_allows_exactly_the_roles_and_scripts_it_should(populated_site):
    """Pages have a strict Content Security Policy, except those of the admin and the API."""
    wrong = {}
    for request_line, row in TABLE.items():
        allowed = dict(zip(ROLES, row.split(), strict=True))
        for role in list_roles(request_line, row):
            with transaction.atomic():  # rolled back, so that every role finds the same state
                answer = send_as(populated_site, role, request_line)
                transaction.set_rollback(True)
            outcome = describe_outcome(request_line, answer)
            if outcome != allowed[role]:
                wrong[request_line, role] = f"{outcome}, not {allowed[role]}"
        if request_line.startswith("GET "):  # the last role is the staff
            check_policy(request_line.split(" ")[1], answer["Content-Security-Policy"])
    assert not wrong


def list_roles(request_line: str, row: str) -> Sequence[str]:
    """List the roles that send a request; `make test-all` tries all requests in all of them.

    `make test` leaves out organisers where all who are signed in may do the same, and the owner
    there, or the volunteer in the admin.
    """
    if EXHAUSTIVE:
        return ROLES
    if request_line.split(" ")[1].startswith("/admin/"):
        return ("visitor", "owner", "staff")
    is_alike = len(set(row.split()[1:])) == 1
    return ("visitor", "volunteer", "staff") if is_alike else ROLES


def check_policy(path: str, policy: str) -> None:
    """Check the Content Security Policy of a page."""
    assert ("unsafe-eval" in policy) == path.startswith("/admin/"), path
    assert ("unsafe-inline" in policy) == path.startswith(("/admin/", "/api/")), path
    assert re.search(r"frame-ancestors 'none'", policy) and "object-src 'none'" in policy


def iterate_routes(resolver=None, before: str = "") -> Iterator[str]:
    """Yield all routes of the site."""
    for entry in (resolver or get_resolver()).url_patterns:
        route = before + str(entry.pattern).removeprefix("^" if before else "")
        if hasattr(entry, "url_patterns"):
            yield from iterate_routes(entry, route)
        else:
            yield route


def test_every_route_has_a_row(populated_site):
    """Leave out the API, whose tables in test_authentication and test_script_api are complete."""
    tested = set()
    for row in TABLE:
        path = row.format(**populated_site.names).split(" ")[1].partition("?")[0]
        tested.add(resolve(path).route)
    routes = {route for route in iterate_routes() if not route.startswith("api/v1/")}
    missing = sorted(routes - tested - HIDDEN_ROUTES)
    assert not missing, f"no row in the table for: {missing}"


def test_every_model_in_the_admin_has_its_rows():
    registered = {
        f"{model._meta.app_label}/{model._meta.model_name}" for model in admin.site._registry
    }
    assert registered == {*VIEWED_MODELS, *THIRD_PARTY_MODELS}


def test_form_of_another_site_changes_nothing(populated_site):
    """Require the CSRF token for every POST, except that mail programs unsubscribe without one."""
    for request_line in (row for row in TABLE if row.startswith("POST ")):
        if "/api/" in request_line or "/notifications/unsubscribe/" in request_line:
            continue
        for role in ("owner", "staff"):
            answer = send_as(populated_site, role, request_line, enforces_csrf=True)
            assert answer.status_code == 403, (role, request_line)
