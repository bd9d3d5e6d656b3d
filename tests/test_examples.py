"""The examples run as their docstrings say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.paths import ROOT

EXAMPLES = ROOT / "examples"


def run_example(name: str, *arguments: object, timeout: float = 300.0, **environment: str) -> str:
    """Run an example as people do, and return what it prints."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("DATABASE_URL", "REDIS_URL", "BARNRAISE_STATE")
    }
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, arguments)],
        env={**inherited, "PYTHONPATH": str(ROOT / "worker"), **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def read_losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]


@pytest.mark.integration
def test_train_alone_reduces_the_loss():
    losses = read_losses(run_example("train_alone", 60))
    assert len(losses) == 4
    assert losses[0] == pytest.approx(5.5, abs=0.2) and losses[-1] < 3.5


@pytest.mark.slow
@pytest.mark.integration
def test_exported_model_writes_what_the_sample_shows(tmp_path):
    from transformers import GPT2LMHeadModel

    output = run_example("export_and_sample", tmp_path / "model", 60)
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "model")
    prompt = torch.tensor([list(b"def main(")])
    assert model(prompt, labels=prompt).loss < 5.0
    assert "\ndef main(" in output


@pytest.mark.slow
@pytest.mark.integration
def test_two_workers_end_with_the_same_weights(public_folder):
    output = run_example("two_workers", 20_000, public_folder, timeout=600.0)
    assert output.endswith("same weights\n")
    losses = read_losses(output)
    assert losses[-1] < losses[0]


def test_each_example_has_a_test_and_says_how_to_run_it():
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == {"train_alone", "export_and_sample", "two_workers"}
    for name in names:
        assert f"python examples/{name}.py" in (EXAMPLES / f"{name}.py").read_text()
        assert f'run_example("{name}"' in Path(__file__).read_text()
