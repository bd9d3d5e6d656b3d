"""Test that a site of each release so far is upgraded by this code, without loss.

The archives next to this file are backups that releases made of sites of their own;
benchmarks/shared/write_upgrade_dump.py writes one.
"""

import json
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from io import StringIO
from pathlib import Path

import pytest
from browser.test_every_page import ADMIN_PAGES, PUBLIC_PAGES, SIGNED_IN_PAGES
from django.conf import global_settings
from django.contrib.contenttypes.models import ContentType
from django.core.management import call_command
from django.db import connection
from django.test import Client, override_settings
from django.utils import timezone
from helpers.site.enrolment_requests import enrolment_request
from helpers.site.second_factor import AuthenticatorApp

from barnraise.protocol.signing import Identity
from coordinator.accounts.models import Enrolment, Machine, Team, TeamInvitation
from coordinator.eventlog import database_owner, projection
from coordinator.fleet.models import Membership
from coordinator.lib import backup, schema_comparison, site_identity
from coordinator.lib.ttl_cache import TtlCache
from coordinator.runs.models import Run, RunInvitation

RELEASES = sorted(Path(__file__).parent.glob("*.tar.xz"))
PAGES = {**PUBLIC_PAGES, **SIGNED_IN_PAGES, **ADMIN_PAGES}
DATABASE = "upgraded"
EMAIL = "ida@example.org"


@dataclass(frozen=True)
class UpgradedSite:
    """A restored and migrated site, and what the release stored about it."""

    names: dict[str, str]  # of its examples, for addresses
    password: str  # Ida's


@pytest.fixture(scope="module", params=RELEASES, ids=lambda path: path.name.partition(".tar")[0])
def upgraded(request, django_db_setup, django_db_blocker, tmp_path_factory):
    """Restore a release's backup into a database of its own, and migrate it."""
    folder = tmp_path_factory.mktemp("backup")
    with tarfile.open(request.param) as archive:
        archive.extractall(folder, filter="data")
    facts = json.loads((folder / "facts.json").read_text())
    changed = {
        "STATE_DIR": tmp_path_factory.mktemp("state"),
        "SECRET_KEY": (folder / "secret_key").read_text().strip(),
        "PASSWORD_HASHERS": global_settings.PASSWORD_HASHERS,
    }
    with django_db_blocker.unblock(), override_settings(**changed), open_empty_database():
        call_command("restore", folder, stdout=StringIO())
        assert projection.state_hash() == facts["state_hash"]
        call_command("migrate", verbosity=0, interactive=False)
        # A release before this page was compared with others had no finished run of its own.
        names = facts["names"]
        later = {"finished_run": names["cancelled_run"], "crew_machine": names["machine"]}
        yield UpgradedSite({**later, **names}, facts["password"])


@contextmanager
def open_empty_database() -> Iterator[None]:
    """Let Django use an empty database while the block runs."""
    with connection.cursor() as cursor:
        cursor.execute(f"DROP DATABASE IF EXISTS {DATABASE} WITH (FORCE)")
        cursor.execute(f"CREATE DATABASE {DATABASE}")
    usual = connection.settings_dict["NAME"]
    switch_database(DATABASE)
    yield
    switch_database(usual)
    with connection.cursor() as cursor:
        cursor.execute(f"DROP DATABASE {DATABASE} WITH (FORCE)")


def switch_database(name: str) -> None:
    """Use another database of the same server, and forget what is known of the one before."""
    connection.close()
    connection.close_pool()
    connection.settings_dict["NAME"] = name
    site_identity.identity.cache_clear()
    schema_comparison.forget()
    ContentType.objects.clear_cache()
    TtlCache.clear_all()


@pytest.fixture
def upgraded_site(upgraded, valkey) -> UpgradedSite:
    """Return the site with an empty Valkey, as after the restore that docs/operate.md describes."""
    return upgraded


def sign_in(site: UpgradedSite) -> Client:
    """Sign in as Ida does: with the password and the authenticator app of before the upgrade."""
    client = Client()
    client.post("/accounts/login/", {"login": EMAIL, "password": site.password})
    answer = client.post("/accounts/2fa/authenticate/", {"code": AuthenticatorApp().next_code()})
    assert answer.status_code == 302 and client.session["_auth_user_id"]
    return client


def renew_what_expires() -> None:
    """Let links of the release's day be valid today."""
    soon = timezone.now() + timedelta(hours=1)
    for model in (Enrolment, RunInvitation, TeamInvitation):
        model.objects.filter().update(expires=soon)


def test_upgraded_database_is_complete_and_belongs_to_this_host(upgraded_site, client):
    assert client.get("/readyz").json() == {
        "ready": True,
        **dict.fromkeys(("database", "valkey", "background", "broadcasts"), "ok"),
    }
    assert not database_owner.describe_refusal()


def test_rebuild_of_an_upgraded_site_finds_the_release_s_state(upgraded_site):
    before, output = projection.state_hash(), StringIO()
    call_command("eventlog", "rebuild", stdout=output)
    lines = output.getvalue().splitlines()
    assert (lines[0], lines[-1]) == ("0 aggregates changed", before)
    assert Team.objects.get().name == "The weavers of another mirror"


def test_every_page_of_an_upgraded_site_answers(upgraded_site, built_frontend):
    renew_what_expires()
    visitor, ida = Client(), sign_in(upgraded_site)
    failed = {}
    for name, address in PAGES.items():
        client = visitor if name in PUBLIC_PAGES else ida
        # Some pages ask for the password again first.
        status = client.get(address.format(**upgraded_site.names), follow=True).status_code
        if status != (404 if name == "nothing-here" else 200):
            failed[name] = status
    assert not failed


def test_machines_of_an_upgraded_site_enrol_join_and_report(
    upgraded_site, numbered_report, machine_requests
):
    run = Run.objects.get(slug=upgraded_site.names["run"])
    identity = Identity(bytes([1]) * 32)  # as page_fixtures.py creates the first machine
    member = Membership.objects.get(run=run, machine__key=identity.key)
    old = machine_requests(member.machine, identity, site_identity.identity().key)
    assert old.join(run).ticket
    before = member.tokens
    old.store_reports(run, numbered_report(1000, tokens=before + 7, incarnation=member.incarnation))
    member.refresh_from_db()
    assert member.tokens == before + 7

    new = Identity(b"n" * 32)
    request = enrolment_request(new)
    signed = new.sign("enrolment", request).model_dump_json()
    answer = Client().post("/api/v1/enrolments", signed, "application/json")
    assert answer.status_code == 200, answer.content
    Enrolment.objects.get(key=new.key).approve(run.owner).confirm(actor=run.owner)
    enrolled = machine_requests(Machine.objects.get(key=new.key), new, site_identity.identity().key)
    assert enrolled.join(run).ticket


def test_upgraded_site_is_backed_up(upgraded_site, tmp_path):
    call_command("backup", tmp_path / "again", stdout=StringIO())
    assert backup.check_backup(tmp_path / "again")["runs_run"] == 3
