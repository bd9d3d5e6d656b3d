"""Test backup and restore of a site, and the table of settings in the documentation."""

import re
import uuid
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from helpers.paths import ROOT

from coordinator.eventlog.models import Origin
from coordinator.lib import site_identity
from coordinator.runs.models import Run

OPERATE = ROOT / "docs" / "operate.md"


def rows() -> dict[str, str]:
    """Table → a digest of all that is in it."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        found = {}
        for (name,) in cursor.fetchall():
            cursor.execute(
                f"SELECT count(*) || md5(string_agg(t::text, '' ORDER BY t::text)) FROM {name} t"
            )
            found[name] = cursor.fetchone()[0]
    return found


def use(name: str) -> str:
    """Another database on the same server from here on; the one before."""
    connection.close()
    connection.close_pool()
    before, connection.settings_dict["NAME"] = connection.settings_dict["NAME"], name
    return before


@pytest.fixture
def elsewhere(valkey, settings, tmp_path):
    """Return a function that moves to a new machine: an empty database and state folder."""
    name, usual, home = (
        f"kept_{uuid.uuid4().hex[:8]}",
        connection.settings_dict["NAME"],
        settings.STATE_DIR,
    )
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {name}")

    def move() -> None:
        use(name)
        settings.STATE_DIR = tmp_path / "state"
        site_identity.identity.cache_clear()

    yield move
    use(usual)
    settings.STATE_DIR = home
    site_identity.identity.cache_clear()
    with connection.cursor() as cursor:
        cursor.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.mark.django_db(transaction=True)
def test_site_is_restored_whole_on_a_new_machine(
    person, launched_run, numbered_report, elsewhere, tmp_path, client
):
    run, ada = launched_run(person())
    ada.report(run, numbered_report(1))
    ours, before, folder, output = (
        site_identity.identity().key,
        rows(),
        tmp_path / "kept",
        StringIO(),
    )
    call_command("backup", folder, stdout=output)
    assert "database.dump" in output.getvalue()
    assert {"database.dump", "mirror.key"} <= {path.name for path in folder.iterdir()}
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir()), "its owner's alone"
    with pytest.raises(CommandError, match="holds a backup already"):
        call_command("backup", folder)

    elsewhere()
    call_command("restore", folder, stdout=output)
    found = rows()
    assert found.pop("eventlog_origin") != before.pop("eventlog_origin"), (
        "its log goes on as a new one"
    )
    assert found == before and len(before) > 30
    assert site_identity.identity().key == ours, "its machines know it again"
    assert (
        client.get("/readyz").status_code == 200
        and run.name in client.get(f"/runs/{run.slug}/").content.decode()
    )
    assert ada.report(run, numbered_report(2)).status_code == 200, "and it knows them"
    assert Run.objects.get().spec_digest == run.spec_digest
    old = Origin.objects.get()
    assert Run.objects.get().pause()
    begun = Origin.objects.get(ours=True)
    assert begun != old and begun.events.first().event.payload["after"] == old.pk
    with pytest.raises(CommandError, match="tables already"):
        call_command("restore", folder)


@pytest.mark.django_db(transaction=True)
def test_a_backup_that_was_cut_off_changes_nothing(person, elsewhere, settings, tmp_path):
    person()
    site_identity.identity()
    call_command("backup", tmp_path / "kept", stdout=StringIO())
    dump = tmp_path / "kept" / "database.dump"
    dump.write_bytes(dump.read_bytes()[: dump.stat().st_size // 2])
    elsewhere()
    with pytest.raises(CommandError, match="pg_restore failed"):
        call_command("restore", tmp_path / "kept")
    assert rows() == {} and not (settings.STATE_DIR / "mirror.key").exists()
    with pytest.raises(CommandError, match=r"there is no database\.dump"):
        call_command("restore", tmp_path / "nowhere")


def test_table_of_settings_matches_the_code():
    from coordinator.staff.management.commands import settings_table

    text = OPERATE.read_text()
    assert settings_table.insert_table(text) == text, (
        "manage.py settings_table --write docs/operate.md"
    )


def test_every_variable_that_the_site_reads_is_in_the_table():
    from coordinator.staff.management.commands import settings_table

    platform = ROOT / "platform" / "coordinator"
    reads = re.compile(r"""environ(?:\.get\(|\[)["']([A-Z_]+)["']""")
    read = {name for path in platform.rglob("*.py") for name in reads.findall(path.read_text())}
    documented = set(re.findall(r"^\| `([A-Z_]+)`", settings_table.settings_table(), re.M))
    assert read - documented <= {"DJANGO_SETTINGS_MODULE", "BARNRAISE_DEBUG"}, "for us alone"
