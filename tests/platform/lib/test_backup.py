"""Test backup and restore of a site, and the table of settings in the documentation."""

import os
import re
import uuid
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from helpers.paths import ROOT

from coordinator.eventlog.models import Origin
from coordinator.lib import site_identity
from coordinator.lib.backup_record import read_last_backup
from coordinator.runs.models import Run

OPERATE = ROOT / "docs" / "operate.md"


def table_digests() -> dict[str, str]:
    """Return table → digest of its rows."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        digests = {}
        for (name,) in cursor.fetchall():
            cursor.execute(
                f"SELECT count(*) || md5(string_agg(t::text, '' ORDER BY t::text)) FROM {name} t"
            )
            digests[name] = cursor.fetchone()[0]
    return digests


def switch_database(name: str) -> str:
    """Use another database on the same server; return the name of the one before."""
    connection.close()
    connection.close_pool()
    before = connection.settings_dict["NAME"]
    connection.settings_dict["NAME"] = name
    return before


@pytest.fixture
def move_to_new_machine(valkey, settings, tmp_path):
    """Return a function that moves to a new machine: an empty database and state folder."""
    name = f"restored_{uuid.uuid4().hex[:8]}"
    usual_database = connection.settings_dict["NAME"]
    state_dir = settings.STATE_DIR
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {name}")

    def move() -> None:
        switch_database(name)
        settings.STATE_DIR = tmp_path / "state"
        site_identity.identity.cache_clear()

    yield move
    switch_database(usual_database)
    settings.STATE_DIR = state_dir
    site_identity.identity.cache_clear()
    with connection.cursor() as cursor:
        cursor.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.mark.django_db(transaction=True)
def test_site_is_restored_whole_on_a_new_machine(
    adas_run, numbered_report, move_to_new_machine, tmp_path, client
):
    run, ada = adas_run
    ada.report(run, numbered_report(1))
    own_key = site_identity.identity().key
    digests_before = table_digests()
    folder = tmp_path / "backup"
    output = StringIO()
    call_command("backup", folder, stdout=output)
    assert "database.dump" in output.getvalue()
    assert {"database.dump", "mirror.key"} <= {path.name for path in folder.iterdir()}
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir()), (
        "others can read the backup"
    )
    with pytest.raises(CommandError, match="holds a backup already"):
        call_command("backup", folder)

    move_to_new_machine()
    call_command("restore", folder, stdout=output)
    digests_after = table_digests()
    assert digests_after.pop("eventlog_origin") != digests_before.pop("eventlog_origin"), (
        "the restored site continues its old log"
    )
    assert digests_after == digests_before and len(digests_before) > 30
    assert site_identity.identity().key == own_key, "the restored site has another key"
    assert client.get("/readyz").status_code == 200
    assert run.name in client.get(f"/runs/{run.slug}/").content.decode()
    assert ada.report(run, numbered_report(2)).status_code == 200, (
        "a machine is unknown after the restore"
    )
    assert Run.objects.get().spec_digest == run.spec_digest
    old_log = Origin.objects.get()
    assert Run.objects.get().pause()
    new_log = Origin.objects.get(ours=True)
    assert new_log != old_log and new_log.events.first().event.payload["after"] == old_log.pk
    with pytest.raises(CommandError, match="tables already"):
        call_command("restore", folder)


@pytest.mark.django_db(transaction=True)
def test_truncated_backup_changes_nothing(person, move_to_new_machine, settings, tmp_path):
    person()
    site_identity.identity()
    call_command("backup", tmp_path / "backup", stdout=StringIO())
    dump = tmp_path / "backup" / "database.dump"
    dump.write_bytes(dump.read_bytes()[: dump.stat().st_size // 2])
    move_to_new_machine()
    with pytest.raises(CommandError, match="pg_restore failed"):
        call_command("restore", tmp_path / "backup")
    assert table_digests() == {} and not (settings.STATE_DIR / "mirror.key").exists()
    with pytest.raises(CommandError, match=r"there is no database\.dump"):
        call_command("restore", tmp_path / "nowhere")


def test_every_environment_variable_is_in_the_table_of_settings():
    platform = ROOT / "platform" / "coordinator"
    reads = re.compile(r"""\bread\(\s*["']([A-Z_]+)["']""")
    read = {name for path in platform.rglob("*.py") for name in reads.findall(path.read_text())}
    documented = set(re.findall(r"^\| `([A-Z_]+)`", OPERATE.read_text(), re.M))
    assert read == documented | {"BARNRAISE_DEBUG"}
    settings_text = (platform / "settings.py").read_text()
    assert "environ." not in settings_text, "every variable is read in one way"


@pytest.mark.django_db(transaction=True)
def test_backup_is_checked_in_a_scratch_database(valkey, settings, tmp_path):
    with connection.cursor() as cursor:
        cursor.execute("SELECT datname FROM pg_database")
        before = set(cursor.fetchall())
    settings.STATE_DIR = state = tmp_path / "state"
    state.mkdir()
    (state / "mirror.key").write_bytes(b"k")
    call_command("backup", str(tmp_path / "one"), stdout=StringIO())
    out = StringIO()
    call_command("restore", str(tmp_path / "one"), "--check", stdout=out)
    assert "accounts_user  " in out.getvalue() and "can be restored" in out.getvalue()
    with connection.cursor() as cursor:
        cursor.execute("SELECT datname FROM pg_database")
        assert set(cursor.fetchall()) == before, "the scratch database is deleted"
    dump = tmp_path / "one" / "database.dump"
    dump.write_bytes(dump.read_bytes()[: dump.stat().st_size // 2])
    with pytest.raises(CommandError, match="pg_restore failed"):
        call_command("restore", str(tmp_path / "one"), "--check")
    (tmp_path / "one" / "mirror.key").unlink()
    with pytest.raises(CommandError, match=r"lacks mirror\.key"):
        call_command("restore", str(tmp_path / "one"), "--check")


@pytest.mark.django_db(transaction=True)
def test_backup_keeps_the_newest_and_records_the_last(valkey, settings, tmp_path):
    settings.STATE_DIR = state = tmp_path / "state"
    state.mkdir()
    parent = tmp_path / "backups"
    for number, name in enumerate(("old", "older")):
        (parent / name).mkdir(parents=True)
        (parent / name / "database.dump").write_bytes(b"x")
        os.utime(parent / name / "database.dump", (1000 - number, 1000 - number))
    (parent / "notes").mkdir()
    call_command("backup", str(parent), keep=2, stdout=StringIO())
    left = sorted(path.name for path in parent.iterdir())
    assert len(left) == 3 and {"old", "notes"} < set(left)
    last = read_last_backup(state)
    assert last and last.size > 10_000 and not last.is_late and last.folder.startswith(str(parent))
    with pytest.raises(CommandError, match="1 or more"):
        call_command("backup", str(parent), keep=0)
