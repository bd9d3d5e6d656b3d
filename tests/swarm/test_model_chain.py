"""A model's way through the whole system: transformers → a run of two machines → transformers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.paths import ROOT
from helpers.site.live_site import Person, Site
from helpers.worker.trained_models import bpe_file, compute_logits

from barnraise.state_dir import StateDir
from barnraise.text.prompt_codec import PromptCodec
from barnraise.training.model_files.trained_model import TrainedModel
from barnraise.training.saved_model import open_saved_model
from coordinator.lib.free_ports import random_free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("transformers"),
    pytest.mark.filterwarnings("ignore"),
]
TOKENS = 24_000
CONTEXT = 32


def write_random_gpt2(folder: Path) -> Path:
    """Write a randomly initialised GPT-2 of transformers, with a tokenizer, to a folder."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(4)
    config = GPT2Config(
        n_layer=3,
        n_embd=48,
        n_head=3,
        n_positions=CONTEXT,
        vocab_size=320,
        bos_token_id=0,
        eos_token_id=0,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(bpe_file(320))
    return folder


def compare_export(home: Path, run: str, target: Path) -> None:
    """Check that transformers reads an export as the model that the machine has saved."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

    with open_saved_model(StateDir(home), run) as saved:
        spec = saved.spec.model
        trained = TrainedModel(spec, saved.tensors, saved.tokenizer)
        tokens = torch.randint(spec.vocabulary, (2, spec.context))
        expected = compute_logits(trained, tokens)
        codec = PromptCodec(trained.tokenizer)
    model: Any = AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, expected, rtol=0, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert tokenizer("The barn")["input_ids"] == codec.encode("The barn")
    prompt = tokenizer("The barn", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=4).shape[1] > prompt["input_ids"].shape[1]
    answer = pipeline("text-generation", model=str(target))("The barn", max_new_tokens=8)
    assert answer[0]["generated_text"].startswith("The barn")


def loss_in_transformers(folder: Path, tokens: torch.Tensor) -> float:
    """Return the mean loss of a model in a folder, computed by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return float(model(tokens, labels=tokens).loss)


def test_random_gpt2_trains_on_two_machines_and_exports(site: Site, tmp_path):
    start = write_random_gpt2(tmp_path / "start")
    text = tmp_path / "barns.txt"
    text.write_text("".join(f"Barn {i} stands on hill {i * i % 97}.\n" for i in range(4000)))
    settings = {
        "start.model": "folder",
        "text.source": "files",
        "text.tokenizer": "bpe",
        "recipe.learning_rate": "3e-3",
        "recipe.round_steps": "5",
        "recipe.evaluate_every": str(TOKENS // 2),
    }
    run = site.launch_run("Chain", TOKENS, *(f"{name}={value}" for name, value in settings.items()))
    person = Person(site)
    for machine in ("ida", "ben"):
        person.enrol(machine)
    prepared = site.barnraise("ida", "prepare", run, str(text), "--model", str(start), "--yes")
    assert prepared.wait(300) == 0, site.log("prepare-ida")
    machines = {
        machine: site.barnraise(machine, "join", run, "--threads", "1")
        for machine in ("ida", "ben")
    }
    for machine, process in machines.items():
        assert process.wait(600) == 0, site.log(f"join-{machine}")
    ends = {machine: site.status(machine) for machine in machines}
    assert len({(end["vector"], end["anchor"]) for end in ends.values()}) == 1, ends
    assert all(end["updates_sent"] >= 1 for end in ends.values())

    # The machine that began evaluated the imported model, as transformers evaluates it.
    tokens_before, loss_before = min(end["validation_first"] for end in ends.values())
    assert tokens_before == 0
    tokens = torch.tensor([PromptCodec(bpe_file(320)).encode(text.read_text())[: 40 * CONTEXT]])
    start_loss = loss_in_transformers(start, tokens.view(40, CONTEXT))
    assert loss_before == pytest.approx(start_loss, abs=0.2)
    assert ends["ida"]["validation_last"][1] < start_loss - 0.5

    target = tmp_path / "exported"
    exported = site.barnraise("ben", "export", run, str(target))
    assert exported.wait(300) == 0, site.log("export-ben")
    compare_export(site.folder / "ben", run, target)
    assert loss_in_transformers(target, tokens.view(40, CONTEXT)) < start_loss - 0.5


def test_demo_is_exported_and_transformers_generates(public_folder):
    environment = {**os.environ, "BARNRAISE_STATE": str(public_folder / "state")}
    for name in ("DATABASE_URL", "REDIS_URL"):
        environment.pop(name, None)
    port = str(random_free_port())
    demo = subprocess.run(
        [sys.executable, ROOT / "manage.py", "demo", "--tokens", "60000", "--port", port],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    summary = json.loads(demo.stdout.strip().splitlines()[-1])
    home = public_folder / "state" / "demo" / "worker-1"
    (folder,) = (home / "runs").iterdir()
    target = public_folder / "exported"
    command = [sys.executable, "-m", "barnraise", "export", folder.name, str(target)]
    subprocess.run([*command, "--home", str(home)], check=True, timeout=300, capture_output=True)
    compare_export(home, folder.name, target)
    assert summary["agree"] and (target / "README.md").read_text().startswith("---")
