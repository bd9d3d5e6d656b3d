"""Test decentralised Adam against its authors' decent-dp 0.2.3, on the same batches."""

import shutil
import sys
from contextlib import ExitStack

import pytest
from helpers.network.loopback_network import LoopbackNetwork
from helpers.paths import ROOT

sys.path.append(str(ROOT / "benchmarks" / "field"))
sys.path.append(str(ROOT / "benchmarks" / "shared"))

from bench_exchange import BUILD, prepare_text
from field_cells import Cell, CellResult, FieldRunner
from field_environment import InstallError, install_systems

STEPS = 12
NOISE = 0.01  # nats a byte between two systems that add in another order
WORKERS = 4


@pytest.fixture
def runner(tmp_path):
    """Provide the benchmark's runner, with decent-dp as the benchmark installs it."""
    try:
        python = install_systems(BUILD / "venv")
    except InstallError as error:
        pytest.fail(f"{error}. `make bench-exchange` installs it where a package index answers")
    prepare_text(tmp_path)
    with ExitStack() as cleanup:
        yield FieldRunner(tmp_path, LoopbackNetwork(WORKERS), {"decent_dp_adam": python}, cleanup)
    shutil.rmtree(tmp_path, ignore_errors=True)


def losses_by_step(result: CellResult) -> dict[int, float]:
    assert result.outcome == "done", result.outcome
    return {step: loss for _, step, loss in result.losses}


@pytest.mark.slow
def test_decentralised_adam_equals_decent_dp_on_equal_batches(runner):
    theirs = runner.run(Cell("decent_dp_adam", None, 300.0, STEPS, 3, {"from_first_step": True}))
    ours = runner.run(Cell("ours_mixing", None, 300.0, STEPS, 3))
    our_losses, their_losses = losses_by_step(ours), losses_by_step(theirs)
    assert sorted(our_losses) == sorted(their_losses) and len(our_losses) == STEPS / 3
    last = max(our_losses)
    for step in sorted(our_losses)[1:]:
        assert our_losses[step] == pytest.approx(their_losses[step], abs=NOISE), step
    assert our_losses[last] < our_losses[0] - 1.0, "both have learnt"
    messages = [[figures["messages"] for figures in each.figures] for each in (ours, theirs)]
    assert messages[0] == messages[1] == [STEPS] * WORKERS
    assert all(figures["missed"] == 0 for figures in ours.figures)
