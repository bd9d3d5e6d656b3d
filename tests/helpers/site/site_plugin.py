"""Give each test process a temporary state folder with an embedded Postgres and Valkey of its own.

Django's settings are read before any test runs, so the servers' addresses are reserved here; the
servers themselves start with the first test that needs a database. Processes that tests start
inherit the addresses from the environment. Under pytest-xdist each worker process therefore has
its own database, Valkey and ports.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import django
import pytest
from django.conf import settings
from helpers.site import migrated_database
from helpers.site.server_guard import start_guard

STATE = Path(tempfile.mkdtemp(prefix="barnraise-tests-"))
STATE.chmod(0o755)  # an embedded Postgres runs as a user of its own where tests run as root
os.environ["BARNRAISE_STATE"] = str(STATE)

from coordinator.lib.embedded import embedded_servers  # noqa: E402  (reads BARNRAISE_STATE when imported)

os.environ["DATABASE_URL"], os.environ["REDIS_URL"] = embedded_servers.reserve(STATE)
os.environ["DJANGO_SETTINGS_MODULE"] = "coordinator.settings"
ADDRESSES = {
    name: os.environ[name]
    for name in ("DJANGO_SETTINGS_MODULE", "DATABASE_URL", "REDIS_URL", "BARNRAISE_STATE")
}
django.setup()
# Each test client would read the list of all static files; so it looks one up when asked for it.
settings.WHITENOISE_AUTOREFRESH = True
settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]  # a fast one


def pytest_configure(config: pytest.Config) -> None:
    """Let xdist's worker processes start without this process's addresses.

    pytest-django reads the settings of a process that inherits DJANGO_SETTINGS_MODULE before this
    file is imported there, and would find the databases of the controlling process.
    """
    if is_controller(config):
        for name in ADDRESSES:
            os.environ.pop(name)


def is_controller(config: pytest.Config) -> bool:
    """Return whether this process only distributes tests to processes of xdist."""
    return bool(config.getoption("numprocesses", None)) and not hasattr(config, "workerinput")


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Migrate a database if the site's code has changed, while `make test` collects tests.

    The processes that do collect would all wait for one of them later.
    """
    is_whole_tier = "BARNRAISE_TESTS" in os.environ
    if is_whole_tier and is_controller(session.config) and not migrated_database.has_dump():
        os.environ.update(ADDRESSES)
        with running_servers():
            migrated_database.read_dump()
        for name in ADDRESSES:
            os.environ.pop(name)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove this process's folder."""
    shutil.rmtree(STATE, ignore_errors=True)


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """Yield an empty folder that every user may enter; an embedded Postgres has one of its own.

    Another session of the same user closes pytest's folders to other users when it starts.
    """
    folder = Path(tempfile.mkdtemp(prefix="barnraise-public-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def running_servers() -> Iterator[None]:
    """Run the servers at DATABASE_URL and REDIS_URL, which end with this process at the latest."""
    guard = start_guard(STATE)
    try:
        started = embedded_servers.start(STATE, durable=False)
        assert started == (os.environ["DATABASE_URL"], os.environ["REDIS_URL"])
        yield
    finally:
        embedded_servers.stop(STATE, force=True)
        guard.kill()
        guard.wait()


@pytest.fixture(scope="session")
def state() -> Iterator[Path]:
    """Run the servers of this process; yield its state folder."""
    with running_servers():
        yield STATE


@pytest.fixture(scope="session")
def django_db_setup(state, django_test_environment, django_db_blocker):
    """Give Django a database with all tables; pytest-django's fixture would migrate one here."""
    from django.db import connection

    name = "test_barnraise"
    migrated_database.create_database(name)
    with django_db_blocker.unblock():
        connection.close()
        settings.DATABASES["default"]["NAME"] = connection.settings_dict["NAME"] = name


@pytest.fixture(scope="session")
def site(state, tmp_path_factory):
    """Run a live site in processes and databases of its own, with an organiser called Ida."""
    from helpers.site.live_site import Site

    live_site = Site(tmp_path_factory.mktemp("site"))
    live_site.open()
    yield live_site
    live_site.processes.stop()
