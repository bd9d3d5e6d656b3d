"""What people do with a run's saved model: samples in reports, `barnraise sample`, `export`."""

import json
import time
from dataclasses import replace

import pytest
import torch
from helpers.worker.fake_hub import open_writable_hub
from helpers.worker.trained_models import compute_logits
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from barnraise.cli.main import app
from barnraise.coordinator_client.reporter import ReportSpool
from barnraise.planning.limits import Limits
from barnraise.protocol.coordinator_messages import Directive, JoinReply, RunView
from barnraise.protocol.enums import RunStatus
from barnraise.protocol.evaluation import TaskScore
from barnraise.protocol.signing import Identity
from barnraise.spec import ModelSpec
from barnraise.training.evaluation import save_score
from barnraise.training.join import JOIN_REPLY_FILE
from barnraise.training.model_files.hugging_face_import import import_hugging_face
from barnraise.training.model_files.trained_model import TrainedModel
from barnraise.training.saved_model import open_saved_model

PROMPTS = ("def ", "import")
DEEP = ModelSpec(layers=6, width=64, heads=2, context=32, vocabulary=256)
ON_DISK = Limits(memory=6_500_000, crash_safety="exact")


@pytest.fixture(params=["memory", pytest.param("disk", marks=pytest.mark.slow)])
def ended(request, swarm):
    """Provide a run that one worker has finished, with its state in memory or on disk."""
    on_disk = request.param == "disk"
    run = swarm(DEEP if on_disk else None, token_budget=12_000, evaluate_every=6_000, round_steps=5)
    run.spec = replace(run.spec, prompts=PROMPTS)
    prompts = {"prompts": [list(prompt.encode()) for prompt in PROMPTS]}
    run.manifest = run.manifest.model_copy(update=prompts)
    ada = run.start("ada", limits=ON_DISK if on_disk else None)
    assert ada.worker.plan.on_disk == on_disk
    ada.join(120)
    signer = Identity(b"m" * 32)
    now = time.time()
    view = RunView(
        id=run.manifest.run,
        slug="tales",
        name="Tales",
        status=RunStatus.FINISHED,
        spec=run.spec.to_json(),
        manifest=signer.sign("manifest", run.manifest),
    )
    directive = Directive(run=view.id, machine=view.id, status=view.status, issued=now)
    reply = JoinReply(
        run=view, ticket=None, directive=signer.sign("directive", directive), peers=[]
    )
    folder = run.home("ada").path / "runs" / view.id
    (folder / JOIN_REPLY_FILE).write_text(reply.model_dump_json())
    return run, folder


def barnraise(run, *arguments: str) -> Result:
    """Run a command on Ada's machine."""
    return CliRunner().invoke(app, [*arguments, "--home", str(run.home("ada").path)])


def test_finished_run_is_sampled_and_exported(ended, tmp_path, monkeypatch):
    run, folder = ended
    # Samples of each evaluation are in the reports.
    spool = ReportSpool(folder / "spool.sqlite")
    sent = [report.samples for report in spool.read_after(0, 1000) if report.samples]
    spool.close()
    tokens = [samples.tokens for samples in sent]
    assert tokens == sorted(tokens), "a fast run evaluates several times between two reports"
    assert tokens[-1] >= 12_000
    assert all([text.prompt for text in samples.texts] == [0, 1] for samples in sent)

    # `sample` writes the same text for the same seed, and whatever memory it has.
    options = ("tales", "--prompt", "def ", "--tokens", "40", "--seed", "3")
    text = barnraise(run, "sample", *options)
    assert text.exit_code == 0 and text.stdout.startswith("def ") and len(text.stdout) > 10
    for memory in ("0", "1GB"):
        assert barnraise(run, "sample", *options, "--memory", memory).stdout == text.stdout
    assert barnraise(run, "sample", *options[:-1], "4").stdout != text.stdout

    # `evaluate` answers tasks with the saved weights; the last score of the run's own is stored.
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"question": "def", "choices": ["main():", "9@~"], "answer": 0}\n' * 5)
    for memory in ("0", "1GB"):
        options = ("--tasks", str(tasks), "--memory", memory)
        answered = barnraise(run, "evaluate", "tales", *options)
        assert "5 of 5 tasks right (100 %), after 12," in answered.stdout, answered.output
    tasks.write_text('{"question": "' + "x" * 99 + '", "choices": ["a", "b"], "answer": 0}')
    refused = barnraise(run, "evaluate", "tales", "--tasks", str(tasks))
    assert "task 1 has 101 tokens" in str(refused.exception)
    save_score(folder, TaskScore(tasks="a" * 64, tokens=12_000, correct=3, count=4))

    # `export` writes the weights that are evaluated, and never over foreign files.
    target = tmp_path / "model"
    for format_options in ((), ("--format", "gguf", "--dtype", "bf16"), ("--license", "mit")):
        written = barnraise(run, "export", "tales", str(target), *format_options)
        assert written.exit_code == 0, written.output
    assert not (target / "model.gguf").exists()
    assert json.loads((target / "config.json").read_text())["n_layer"] == run.spec.model.layers
    card = (target / "README.md").read_text()
    assert "Tales" in card and "1 machine |" in card and "license: " in card and "nats" in card
    assert "| Multiple choice | 3 of 4 tasks right (75 %), after 12,000 tokens |" in card
    (target / "notes.txt").write_text("mine")
    refused = barnraise(run, "export", "tales", str(target))
    assert refused.exit_code != 0 and "notes.txt" in str(refused.exception)
    (target / "notes.txt").unlink()

    # `export --push` needs no folder, and leaves none behind.
    hub = open_writable_hub(monkeypatch, tmp_path)
    pushed = barnraise(run, "export", "tales", "--push", "owner/tales")
    hub.close()
    assert pushed.exit_code == 0 and f"{hub.url}/owner/tales" in pushed.output, pushed.output
    weights = (target / "model.safetensors").read_bytes()
    assert hub.repositories["models/owner/tales"]["model.safetensors"] == weights
    assert not (run.home("ada").path / "push").exists()

    # The export is the model, and imports again as the same model.
    with open_saved_model(run.home("ada"), "tales") as saved:
        trained = TrainedModel(run.spec.model, saved.tensors)
        tokens = torch.arange(32)[None]
        expected = compute_logits(trained, tokens)
    assert "transformer.h.1.mlp.c_proj.weight" in load_file(target / "model.safetensors")
    stored: list[bytes] = []
    import_hugging_face(target, lambda data: stored.append(bytes(data)) or f"{len(stored):064x}")
    tensors = {
        f"anchor.{i}": torch.frombuffer(bytearray(data), dtype=torch.int32)
        for i, data in enumerate(stored)
    }
    again = compute_logits(TrainedModel(run.spec.model, tensors), tokens)
    torch.testing.assert_close(again, expected, rtol=0, atol=1e-5)
