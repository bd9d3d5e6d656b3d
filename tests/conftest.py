"""Give each test process a temporary state folder with an embedded Postgres and Valkey of its own.

Django's settings are read before any test runs, so the servers' addresses are reserved here; the
servers themselves start with the first test that needs a database. Processes that tests start
inherit the addresses from the environment. Under pytest-xdist each worker process therefore has
its own database, Valkey and ports.
"""

import gc
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import django
import hypothesis
import pytest
from django.conf import settings

STATE = Path(tempfile.mkdtemp(prefix="barnraise-tests-"))
STATE.chmod(0o755)  # an embedded Postgres runs as a user of its own where tests run as root
os.environ["BARNRAISE_STATE"] = str(STATE)

from coordinator.lib import embedded_servers  # noqa: E402  (reads BARNRAISE_STATE when imported)

os.environ["DATABASE_URL"], os.environ["REDIS_URL"] = embedded_servers.reserve(STATE)
os.environ["DJANGO_SETTINGS_MODULE"] = "coordinator.settings"
# xdist sets the size of its terminal, and a console that is created with it never changes its own.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)
os.environ.setdefault("OMP_NUM_THREADS", "1")
django.setup()
# How many cases `make test` tries of property tests that name no number, the same ones each time.
# `make test-all` tries those of Hypothesis's own profile "ci".
hypothesis.settings.register_profile("few", hypothesis.settings.get_profile("ci"), max_examples=25)
# Each test client would read the list of all static files; so it looks one up when asked for it.
settings.WHITENOISE_AUTOREFRESH = True
settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]  # a fast one

# Tests that start servers, browsers, command lines or networks of machines, that train models for
# many steps, or that visit every page: not part of `make test-fast`.
INTEGRATION_FOLDERS = {"browser", "swarm", "cli", "demo"}
INTEGRATION_MODULES = {
    "test_bandwidth",
    "test_bitwise",
    "test_celery",
    "test_deployment",
    "test_embedded_servers",
    "test_faults",
    "test_gpu_first",
    "test_iroh_transport",
    "test_memory_model",
    "test_permissions",
    "test_queries",
    "test_retention",
    "test_scale",
    "test_state_store",
    "test_three_mirrors",
    "test_transport",
}
OWN_SITE_MODULES = {"test_every_page", "test_journey"}  # each with a live site of its own
# Fixtures that start a whole site, several machines of a run, or a process with a fake card.
INTEGRATION_FIXTURES = {"site", "live_server", "sites", "pair", "world", "card"}


def pytest_configure(config: pytest.Config) -> None:
    """Let xdist's worker processes start without this process's addresses.

    pytest-django reads the settings of a process that inherits DJANGO_SETTINGS_MODULE before this
    file is imported there, and would find the databases of the controlling process.
    """
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        for name in ("DJANGO_SETTINGS_MODULE", "DATABASE_URL", "REDIS_URL", "BARNRAISE_STATE"):
            os.environ.pop(name)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Exclude modules and collected tests from each search for garbage.

    They are a million objects and live until the end. A full search would visit all of them again,
    for half a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Search for garbage once; pytest searches five times, through a million objects that live."""
    gc.collect()
    gc.freeze()


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Name cases of bytes by their length: what a library writes may differ between processes."""
    return f"{len(val)} bytes" if isinstance(val, bytes) else None


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in its own hook of this name
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark integration tests, and keep tests that share a live site or a text in one xdist worker.

    Tests that take as long as all others together have a live site of their own: otherwise the
    other processes would wait for the one that runs them all.
    """
    for item in items:
        folders = item.path.relative_to(Path(__file__).parent).parts[:-1]
        fixtures = set(getattr(item, "fixturenames", ()))
        if (
            INTEGRATION_FOLDERS.intersection(folders)
            or item.path.stem in INTEGRATION_MODULES
            or INTEGRATION_FIXTURES & fixtures
        ):
            item.add_marker(pytest.mark.integration)
        if "site" in fixtures and item.path.stem in OWN_SITE_MODULES:
            item.add_marker(pytest.mark.xdist_group(f"site of {item.path.stem}"))
        elif "sites" in fixtures:
            item.add_marker(pytest.mark.xdist_group(f"sites of {item.path.stem}"))
        elif "stdlib" in fixtures:
            item.add_marker(pytest.mark.xdist_group("prepared text"))
        elif "site" in fixtures:
            item.add_marker(pytest.mark.xdist_group("site"))
        elif "exchange" in folders:
            # Peers wait for each other: as groups, which xdist begins with, they wait while the
            # other processes compute.
            item.add_marker(pytest.mark.xdist_group(f"exchange {item.path.stem}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many tests each suite ran and how long they took, summed over processes."""
    seconds: dict[str, float] = defaultdict(float)
    tests: dict[str, int] = defaultdict(int)
    for outcome in ("passed", "failed", "error", ""):
        for report in terminalreporter.stats.get(outcome, []):
            if not isinstance(report, pytest.TestReport):
                continue
            suite = "/".join(report.nodeid.split("::")[0].split("/")[1:3]).removesuffix(".py")
            seconds[suite] += report.duration
            tests[suite] += report.when == "call"
    terminalreporter.section("seconds of each suite, summed over processes", sep="-")
    for suite, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        terminalreporter.write_line(f"{suite:32} {tests[suite]:5} tests {spent:8.1f} s")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop this process's servers and remove its folder."""
    embedded_servers.stop(STATE, force=True)
    shutil.rmtree(STATE, ignore_errors=True)


@pytest.fixture(autouse=True)
def restore_torch_threads() -> Iterator[None]:
    """Give each test the usual number of torch threads, whatever the test before it set."""
    yield
    usual = int(os.environ["OMP_NUM_THREADS"])
    torch = sys.modules.get("torch")
    if torch and torch.get_num_threads() != usual:
        torch.set_num_threads(usual)


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """Yield an empty folder that every user may enter; an embedded Postgres has one of its own.

    Another session of the same user closes pytest's folders to other users when it starts.
    """
    folder = Path(tempfile.mkdtemp(prefix="barnraise-public-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def state() -> Path:
    """Start the servers at DATABASE_URL and REDIS_URL; return this process's state folder."""
    started = embedded_servers.start(STATE, durable=False)
    assert started == (os.environ["DATABASE_URL"], os.environ["REDIS_URL"])
    return STATE


@pytest.fixture(scope="session")
def django_db_setup(state, django_test_environment, django_db_blocker):
    """Give Django a database with all tables; pytest-django's fixture would migrate one here."""
    from django.db import connection
    from helpers import migrated_database

    name = "test_barnraise"
    migrated_database.create_database(name)
    with django_db_blocker.unblock():
        connection.close()
        settings.DATABASES["default"]["NAME"] = connection.settings_dict["NAME"] = name


@pytest.fixture(scope="session")
def site(state, tmp_path_factory):
    """Run a live site in processes and databases of its own, with an organiser called Ida."""
    from helpers.live_site import Site

    live_site = Site(tmp_path_factory.mktemp("site"))
    live_site.open()
    yield live_site
    live_site.processes.stop()
