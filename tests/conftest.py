"""Mark and group the tests, end them in order, and load the site's fixtures if it is installed."""

import gc
import importlib.util
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import hypothesis
import psutil
import pytest

# Those who work on the worker alone need not install the site: `make test-worker` does without.
HAS_SITE = os.environ.get("BARNRAISE_TESTS") != "worker" and importlib.util.find_spec("django")
pytest_plugins = ["helpers.site.site_plugin"] if HAS_SITE else []

# xdist sets the size of its terminal, and a console that is created with it never changes its own.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# How many cases `make test` tries of property tests that name no number, the same ones each time.
# `make test-all` tries those of Hypothesis's own profile "ci".
hypothesis.settings.register_profile("few", hypothesis.settings.get_profile("ci"), max_examples=25)

# Tests that start servers, browsers, command lines or networks of machines, that train models for
# many steps or on several devices, that plan for large models on many machines, or that visit every
# page: not part of `make test-fast` and `make test-worker`.
INTEGRATION_FOLDERS = {"browser", "swarm", "cli", "demo"}
INTEGRATION_MODULES = {
    "test_bandwidth",
    "test_bitwise",
    "test_card_choice",
    "test_card_restart",
    "test_carriers",
    "test_celery",
    "test_crew_balance",
    "test_crew_bits",
    "test_crew_pricing",
    "test_deployment",
    "test_devices",
    "test_embedded_servers",
    "test_faults",
    "test_gpu_first",
    "test_iroh_transport",
    "test_llama_bits",
    "test_membership_scale",
    "test_memory_model",
    "test_muon",
    "test_permissions",
    "test_plan_table",
    "test_queries",
    "test_rank_plans",
    "test_relay_swarm",
    "test_retention",
    "test_scale",
    "test_search",
    "test_shared_card",
    "test_state_store",
    "test_three_mirrors",
    "test_transport",
}
OWN_SITE_MODULES = {"test_every_page", "test_journey"}  # each with a live site of its own
# Fixtures that start a whole site, several machines of a run, or a process with a fake card.
INTEGRATION_FIXTURES = {"site", "live_server", "sites", "pair", "world", "card"}


def pytest_configure(config: pytest.Config) -> None:
    """Let SIGTERM end the tests in order, also those in xdist's worker processes."""
    is_controller = getattr(config.option, "numprocesses", None) and not hasattr(
        config, "workerinput"
    )
    signal.signal(signal.SIGTERM, _interrupt_controller if is_controller else _interrupt_tests)


def _interrupt_tests(number: int, frame: object) -> None:
    """End the tests as Ctrl-C does: fixtures stop the processes that they have started."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _interrupt_controller(number: int, frame: object) -> None:
    """Pass the signal on to xdist's processes; only a terminal would send Ctrl-C to all of them."""
    for process in psutil.Process().children():
        process.terminate()
    _interrupt_tests(number, frame)


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


@cache
def locate(path: Path) -> tuple[tuple[str, ...], str]:
    """Return the folders that a module lies in, below this one, and its name."""
    return path.relative_to(Path(__file__).parent).parts[:-1], path.stem


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in its own hook of this name
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark integration tests, and keep tests that share a live site or a text in one xdist worker.

    Tests that take as long as all others together have a live site of their own: otherwise the
    other processes would wait for the one that runs them all.
    """
    for item in items:
        folders, module = locate(item.path)
        fixtures = set(getattr(item, "fixturenames", ()))
        # Tests of the worker call a stand-in of their own by that name.
        needs_live_site = "site" in fixtures and "worker" not in folders
        if (
            INTEGRATION_FOLDERS.intersection(folders)
            or module in INTEGRATION_MODULES
            or INTEGRATION_FIXTURES & fixtures
        ):
            item.add_marker(pytest.mark.integration)
        if needs_live_site and module in OWN_SITE_MODULES:
            item.add_marker(pytest.mark.xdist_group(f"site of {module}"))
        elif "sites" in fixtures:
            item.add_marker(pytest.mark.xdist_group(f"sites of {module}"))
        elif "stdlib" in fixtures:
            item.add_marker(pytest.mark.xdist_group("prepared text"))
        elif needs_live_site:
            item.add_marker(pytest.mark.xdist_group("site"))
        elif "exchange" in folders:
            # Peers wait for each other: as groups, which xdist begins with, they wait while the
            # other processes compute.
            item.add_marker(pytest.mark.xdist_group(f"exchange {module}"))


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


@pytest.fixture(autouse=True)
def restore_torch_threads() -> Iterator[None]:
    """Give each test the usual number of torch threads, whatever the test before it set."""
    yield
    usual = int(os.environ["OMP_NUM_THREADS"])
    torch = sys.modules.get("torch")
    if torch and torch.get_num_threads() != usual:
        torch.set_num_threads(usual)
