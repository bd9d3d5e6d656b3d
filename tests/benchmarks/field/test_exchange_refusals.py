"""Test how the exchange benchmark ends when something is missing, and after Ctrl-C."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers.paths import ROOT

BENCHMARK = ROOT / "benchmarks" / "field" / "bench_exchange.py"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "worker")}
SECONDS = 180.0
# Starts the benchmark as a user without rights, or where no package index answers.
WITHOUT_INDEX = (
    "import os, pathlib; os.environ['PIP_NO_INDEX'] = '1'; import bench_exchange;"
    "bench_exchange.BUILD = pathlib.Path({folder!r})"
)


def run_main(preparation: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    script = (
        f"import sys; sys.path[:0] = [{str(BENCHMARK.parent)!r}];"
        f"sys.argv = ['bench_exchange.py', '--quick', '--output', {str(tmp_path / 'out')!r}];"
        f"{preparation}\nimport bench_exchange\nbench_exchange.main()"
    )
    return subprocess.run(
        [sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True
    )


def list_namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


@pytest.mark.slow  # imports torch
def test_lines_without_delay_are_for_pipelines_alone(tmp_path):
    for parts in ([], ["--only", "loss"], ["--only", "pipelines", "--only", "loss"]):
        done = run_main(f"sys.argv += ['--without-delay', *{parts!r}]", tmp_path)
        assert done.returncode == 2 and "needs --only pipelines" in done.stderr


@pytest.mark.slow  # creates an environment
def test_benchmark_without_a_package_index_ends_with_code_2(tmp_path):
    done = run_main(WITHOUT_INDEX.format(folder=str(tmp_path / "build")), tmp_path)
    assert done.returncode == 2
    (sentence,) = done.stderr.strip().splitlines()
    assert "cannot be installed" in sentence or "cannot be made" in sentence
    assert not (tmp_path / "out").exists(), "nothing was measured"


@pytest.mark.slow  # builds the network and starts all workers
def test_benchmark_after_ctrl_c_leaves_no_namespace_and_no_process(tmp_path):
    process = subprocess.Popen(
        [sys.executable, BENCHMARK, "--quick", "--only", "unequal", "--output", tmp_path / "out"],
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    last_namespace = f"bf{process.pid}n3"
    deadline = time.monotonic() + SECONDS
    while last_namespace not in list_namespaces() and process.poll() is None:
        assert time.monotonic() < deadline, "the network was not built"
        time.sleep(0.2)
    if process.poll() is not None:  # this user may not build networks
        assert process.returncode == 2
        return
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode != 0 and "Traceback" not in errors, errors
    assert f"bf{process.pid}" not in list_namespaces()
    psutil.wait_procs(children, timeout=SECONDS)
    assert not [child for child in children if child.is_running()]
