"""A GPT-2 in a folder becomes a run's weights, and what would differ is refused by its name."""

import json
from pathlib import Path

import pytest
import torch
from helpers.worker.fake_hub import FakeHub
from helpers.worker.trained_models import BPE, BYTES, bpe_file, larger_bpe_file, make_trained_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE as BPEModel

from barnraise.errors import StateError
from barnraise.ledger.anchor import fragment_from_bytes
from barnraise.ledger.blob_store import BlobStore
from barnraise.training.join import InitialWeights
from barnraise.training.model_files.hugging_face_export import export_hugging_face
from barnraise.training.model_files.hugging_face_import import (
    download_model,
    import_hugging_face,
)

TRAINED = make_trained_model(BPE, bpe_file())


@pytest.fixture
def folder(tmp_path) -> Path:
    """Provide a model in one file."""
    (tmp_path / "model").mkdir()
    export_hugging_face(tmp_path / "model", TRAINED)
    return tmp_path / "model"


def read_back(folder: Path) -> tuple[InitialWeights, list[torch.Tensor]]:
    """Import a folder; return what was imported and its fragments."""
    blobs = BlobStore(folder.parent / "blobs")
    imported = import_hugging_face(folder, blobs.store)
    return imported, [fragment_from_bytes(blobs.read(name)) for name in imported.fragments]


def change_tensors(folder: Path, **changes) -> None:
    """Replace tensors by name; None removes one. `model` replaces all by a function of each."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    convert = changes.pop("convert", None)
    if convert:
        tensors = {name: convert(tensor) for name, tensor in tensors.items()}
    rename = changes.pop("rename", None)
    if rename:
        tensors = {rename(name): tensor for name, tensor in tensors.items()}
    for name, tensor in changes.items():
        key = name.replace("__", ".")
        if tensor is None:
            del tensors[key]
        else:
            tensors[key] = tensor
    save_file(tensors, path)


def change_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_exported_model_is_imported_to_the_same_units(folder):
    imported, fragments = read_back(folder)
    assert imported.model == BPE
    for fragment, units in zip(BPE.fragments(), fragments, strict=True):
        expected = TRAINED.tensors[f"anchor.{fragment.index}"]
        # A weight of 24 bits loses at most its last bits in fp32.
        assert (units - expected).abs().max() <= 4
    assert imported.tokenizer == TRAINED.tokenizer


def test_byte_run_is_imported_with_its_tokenizer_of_bytes(tmp_path):
    (tmp_path / "model").mkdir()
    export_hugging_face(tmp_path / "model", make_trained_model(BYTES))
    imported, _ = read_back(tmp_path / "model")
    assert imported.model == BYTES and imported.tokenizer is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_shards_and_old_names_are_read(dtype, folder):
    _, whole = read_back(folder)
    change_tensors(
        folder,
        convert=lambda tensor: tensor.to(dtype),
        rename=lambda name: name.removeprefix("transformer."),
        h__0__attn__bias=torch.ones(1, 1, 4, 4),  # the causal mask of old files
    )
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number, name in enumerate(sorted(tensors)):
        file = f"model-0000{number % 2 + 1}-of-00002.safetensors"
        weight_map[name] = file
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, folder / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    _, fragments = read_back(folder)
    for ours, exact in zip(fragments, whole, strict=True):
        assert (ours - exact).abs().max() <= 1 << 18, "half of the spacing of bf16 above 1.0"


def test_head_must_be_the_token_table(folder):
    table = load_file(folder / "model.safetensors")["transformer.wte.weight"]
    change_tensors(folder, lm_head__weight=table.clone())
    read_back(folder)
    change_tensors(folder, lm_head__weight=table + 1)
    with pytest.raises(StateError, match=r"lm_head\.weight.*tie_word_embeddings"):
        read_back(folder)


@pytest.mark.parametrize(
    ("tensor", "value", "reason"),
    [
        ("transformer__h__1__ln_1__bias", None, "no tensor h.1.ln_1.bias"),
        ("transformer__h__0__attn__rotary", torch.ones(2), "a tensor h.0.attn.rotary"),
        ("transformer__wpe__weight", torch.ones(8, 48), r"wpe.weight has the shape \[8, 48\]"),
        ("transformer__ln_f__bias", torch.full((48,), float("nan")), "ln_f.bias holds nan"),
        ("transformer__ln_f__weight", torch.full((48,), 40.0), "ln_f.weight holds 40"),
        ("transformer__ln_f__bias", torch.ones(48, dtype=torch.int8), "holds torch.int8"),
    ],
)
def test_wrong_tensor_is_refused_by_its_name(tensor, value, reason, folder):
    change_tensors(folder, **{tensor: value})
    with pytest.raises(StateError, match=reason):
        read_back(folder)


def test_damaged_missing_or_outside_files_are_sentences(folder):
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StateError, match="not a complete safetensors file"):
        read_back(folder)
    weights.unlink()
    with pytest.raises(StateError, match="only safetensors are read"):
        read_back(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../blobs/secret.safetensors"}}))
    with pytest.raises(StateError, match="no file of its folder"):
        read_back(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(StateError, match="not valid JSON"):
        read_back(folder)
    (folder / "config.json").unlink()
    with pytest.raises(StateError, match=r"has no config\.json"):
        read_back(folder)


def test_shard_that_is_missing_is_named(folder):
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"wte.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(StateError, match=r"names model-00001-of-00002\.safetensors, which is not"):
        read_back(folder)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (larger_bpe_file(340), "has 340 tokens, and the setting vocab_size .* is 333"),
        (b"version https://git-lfs.github.com/spec/v1", "cannot be read"),
        (Tokenizer(BPEModel()).to_str().encode(), "no token that ends a text"),
    ],
    ids=["too many", "pointer", "no end"],
)
def test_tokenizer_that_does_not_fit_is_refused(content, reason, folder):
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(StateError, match=reason):
        read_back(folder)


def test_model_without_a_tokenizer_is_refused(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(StateError, match=r"no tokenizer\.json"):
        read_back(folder)


def test_setting_of_another_model_is_refused_before_weights_are_read(folder):
    change_config(folder, activation_function="relu")
    (folder / "model.safetensors").unlink()
    with pytest.raises(StateError, match="activation_function"):
        read_back(folder)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Provide a stand-in for the hub, with a cache of its own."""
    from huggingface_hub import constants

    served = FakeHub()
    template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", served.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    yield served
    served.close()


def test_model_of_the_hub_is_downloaded_without_its_other_files(hub, folder):
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.repositories["models/owner/tiny"] = {
        **files,
        "pytorch_model.bin": b"x",
        "onnx/m.onnx": b"y",
    }
    downloaded = download_model("owner/tiny@main")
    names = {path.name for path in downloaded.rglob("*")}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not names & {"pytorch_model.bin", "m.onnx"}
    imported = import_hugging_face(downloaded, BlobStore(folder.parent / "blobs").store)
    assert imported.model == BPE
    with pytest.raises(StateError, match=r"owner/other could not be downloaded: \S+"):
        download_model("owner/other")


@pytest.mark.xdist_group("transformers")
def test_randomly_initialised_model_of_transformers_keeps_its_logits(tmp_path):
    import dataclasses

    from helpers.worker.trained_models import compute_logits
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    sizes = {"n_layer": 2, "n_embd": 48, "n_head": 4, "n_positions": 40, "vocab_size": 333}
    theirs = GPT2LMHeadModel(GPT2Config(**sizes)).eval()
    theirs.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_bytes(bpe_file())
    imported, fragments = read_back(tmp_path / "model")
    ours = dataclasses.replace(
        TRAINED,
        model=imported.model,
        tensors={f"anchor.{i}": units for i, units in enumerate(fragments)},
    )
    tokens = torch.randint(333, (2, 40))
    with torch.no_grad():
        expected = theirs(tokens).logits
    torch.testing.assert_close(compute_logits(ours, tokens), expected, rtol=0, atol=1e-5)
