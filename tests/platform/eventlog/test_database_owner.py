"""A host that has other keys than the first one neither serves the database nor creates a key."""

import os
import subprocess
import sys
from urllib.parse import urlsplit

import pytest
from django.db import connection
from helpers.effort import one_in
from helpers.paths import ROOT, WORKER
from helpers.site.management import manage

from coordinator.eventlog import database_owner, writer
from coordinator.eventlog.models import LogState, Origin
from coordinator.lib import site_identity
from coordinator.lib.exceptions import OtherSiteError
from coordinator.staff import doctor
from coordinator.staff.doctor import Health

STARTS = {
    "web": ("-m", "uvicorn", "coordinator.asgi:application", "--port", "0"),
    "celery": ("-m", "celery", "-A", "coordinator.celery:app", "worker", "-P", "solo"),
    "beat": ("-m", "celery", "-A", "coordinator.celery:app", "beat", "--pidfile="),
}


@pytest.fixture
def second_host(state, transactional_db, note_rows, tmp_path):
    """Return the environment of a host with an empty state folder and the first one's servers."""
    writer.record("note.write", "a", {"text": "x"})
    database_owner.check_database_owner()
    name = connection.settings_dict["NAME"]
    return {
        "DATABASE_URL": urlsplit(os.environ["DATABASE_URL"])._replace(path=f"/{name}").geturl(),
        "BARNRAISE_STATE": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "platform"), str(WORKER)]),
    }


@pytest.mark.parametrize("part", one_in(3, list(STARTS)))
def test_second_host_with_an_empty_state_folder_ends_at_start(part, second_host, tmp_path):
    done = subprocess.run(
        [sys.executable, *STARTS[part]],
        cwd=tmp_path,
        env={**os.environ, **second_host},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    key = site_identity.identity().key
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert f"belongs to mirror {key[:8]}, and there is no {tmp_path}/mirror.key" in done.stderr
    assert not (tmp_path / "mirror.key").exists(), "a second key would end the first one's log"


def test_second_host_with_the_first_ones_keys_works(second_host, tmp_path):
    print_key = "from coordinator.lib import site_identity; print(site_identity.identity().key)"
    answer = manage(second_host, "shell", "-c", print_key, fails=True)
    assert "copy the state folder of the first host, or set BARNRAISE_MIRROR_KEY" in answer
    second_host["BARNRAISE_MIRROR_KEY"] = site_identity.identity().secret.hex()
    assert manage(second_host, "shell", "-c", print_key).endswith(site_identity.identity().key)
    manage(second_host, "eventlog", "adopt")
    assert Origin.objects.count() == 1 and not (tmp_path / "mirror.key").exists()


@pytest.mark.django_db
def test_another_secret_is_refused_until_the_change_is_deliberate(settings, valkey):
    LogState.objects.get_or_create()
    database_owner.check_database_owner()
    database_owner.check_database_owner()
    settings.SECRET_KEY = "another"
    with pytest.raises(OtherSiteError, match="another SECRET_KEY") as refused:
        database_owner.check_database_owner()
    assert "manage.py eventlog change-owner" in str(refused.value)
    (finding,) = doctor.check_database()
    assert finding.verdict is Health.FAILURE and "signed out" in finding.sentence
    database_owner.change_owner()
    assert database_owner.describe_refusal() == ""
