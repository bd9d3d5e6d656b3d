"""One temporary state folder for the whole session, never the repository's own.

Settings are read before any test, so the servers' addresses are reserved here; the servers themselves start with the
first test that wants a database. Processes that tests start inherit the addresses from the environment.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import django
import pytest

STATE = Path(tempfile.mkdtemp(prefix="barnraise-tests-"))
STATE.chmod(0o755)  # an embedded Postgres runs as a user of its own where tests run as root
os.environ["BARNRAISE_STATE"] = str(STATE)

from coordinator.lib import embedded_servers  # noqa: E402  (the state folder must be named first)

os.environ["DATABASE_URL"], os.environ["REDIS_URL"] = embedded_servers.reserve(STATE)
os.environ["DJANGO_SETTINGS_MODULE"] = "coordinator.settings"
os.environ.setdefault("OMP_NUM_THREADS", "1")
django.setup()


def pytest_unconfigure(config):
    embedded_servers.stop(STATE, force=True)
    shutil.rmtree(STATE, ignore_errors=True)


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    """What one test does to torch's threads is not the next one's."""
    yield
    if (torch := sys.modules.get("torch")) and torch.get_num_threads() != (
        usual := int(os.environ["OMP_NUM_THREADS"])
    ):
        torch.set_num_threads(usual)


@pytest.fixture(scope="session")
def state() -> Path:
    """The session's state folder, with its servers running at DATABASE_URL and REDIS_URL."""
    found = embedded_servers.start(STATE, durable=False)
    assert found == (os.environ["DATABASE_URL"], os.environ["REDIS_URL"])
    return STATE


@pytest.fixture(scope="session")
def django_db_modify_db_settings(state, django_db_modify_db_settings):
    """Before Django makes its test database, there must be a server to make it in."""


@pytest.fixture(scope="session")
def site(state, tmp_path_factory):
    """A live site in processes of its own, on databases of its own, with an organiser called Ida (see live_site)."""
    from helpers.live_site import Site

    ours = Site(tmp_path_factory.mktemp("site"))
    ours.open()
    yield ours
    ours.family.stop()
