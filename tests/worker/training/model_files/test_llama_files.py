"""A Llama or Qwen3 is exported, read by transformers and imported; what would differ is refused."""

import dataclasses
import json

import pytest
import torch
from helpers.worker.llama_models import QWEN, UNTIED, random_fragments, transformers_model
from helpers.worker.trained_models import bpe_file, compute_logits, make_trained_model

from barnraise.errors import StateError
from barnraise.ledger.anchor import fragment_from_bytes
from barnraise.ledger.blob_store import BlobStore
from barnraise.spec import MAX_CONTEXT
from barnraise.training.model_files.hugging_face_export import export_hugging_face
from barnraise.training.model_files.hugging_face_import import import_hugging_face
from barnraise.training.model_files.trained_model import EXPORT_DTYPES
from barnraise.training.model_files.transformers_config import model_config, read_model

pytestmark = pytest.mark.xdist_group("transformers")
MODELS = pytest.mark.parametrize("model", [UNTIED, QWEN], ids=["llama", "qwen3"])
TEXT = "The barn is raised together."


def import_folder(folder):
    """Import a folder; return what was imported and its fragments."""
    blobs = BlobStore(folder.parent / "blobs")
    imported = import_hugging_face(folder, blobs.store)
    return imported, [fragment_from_bytes(blobs.read(name)) for name in imported.fragments]


@MODELS
@pytest.mark.parametrize("dtype", EXPORT_DTYPES)
def test_transformers_reads_an_export_and_gives_our_logits(model, dtype, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained = make_trained_model(model, bpe_file(300))
    export_hugging_face(tmp_path, trained, EXPORT_DTYPES[dtype])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = torch.tensor([AutoTokenizer.from_pretrained(tmp_path)(TEXT)["input_ids"]])
    with torch.no_grad():
        expected = theirs(tokens).logits
    ours = compute_logits(trained, tokens, EXPORT_DTYPES[dtype])
    assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()


@MODELS
def test_exported_model_is_imported_to_the_same_units(model, tmp_path):
    trained = make_trained_model(model, bpe_file(300))
    (tmp_path / "model").mkdir()
    export_hugging_face(tmp_path / "model", trained, shard_bytes=1 << 16)
    assert (tmp_path / "model" / "model.safetensors.index.json").exists()
    imported, fragments = import_folder(tmp_path / "model")
    assert imported.model == model and imported.tokenizer == trained.tokenizer
    for index, units in enumerate(fragments):
        assert (units - trained.tensors[f"anchor.{index}"]).abs().max() <= 4


@MODELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_of_transformers_keeps_its_logits(model, dtype, tmp_path):
    random = transformers_model(model, random_fragments(model))
    random.to(dtype).save_pretrained(tmp_path / "model")
    theirs = type(random).from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    (tmp_path / "model" / "tokenizer.json").write_bytes(bpe_file(300))
    imported, fragments = import_folder(tmp_path / "model")
    assert imported.model == model
    tensors = {f"anchor.{i}": units for i, units in enumerate(fragments)}
    ours = dataclasses.replace(make_trained_model(model), tensors=tensors)
    tokens = torch.randint(model.vocabulary, (2, model.context))
    with torch.no_grad():
        expected = theirs(tokens).logits
    distance = (compute_logits(ours, tokens) - expected).abs().max()
    assert distance <= 1e-5 * expected.abs().max()


@MODELS
def test_own_configuration_reads_back_as_the_model(model):
    assert read_model(model_config(model, 0, "float32")) == model


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("model_type", "mixtral"),
        ("model_type", "qwen3_moe"),
        ("rope_scaling", {"rope_type": "llama3", "factor": 32.0}),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("rope_parameters", {"rope_type": "dynamic", "rope_theta": 1e4}),
        ("sliding_window", 4096),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("layer_types", [["full_attention"]]),
        ("layer_types", 5),
        ("num_local_experts", 8),
        ("partial_rotary_factor", 0.5),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("rope_theta", "many"),
        ("rope_theta", 10**400),
        ("num_key_value_heads", 3),
        ("head_dim", 15),
        ("hidden_size", 1.5),
        ("rms_norm_eps", 1.0),
        ("vocab_size", 10**9),
        ("logit_softcapping", 30.0),
    ],
)
def test_setting_that_runs_do_not_train_is_refused_by_its_name(setting, value):
    config = model_config(UNTIED, 0, "float32")
    with pytest.raises(StateError, match=setting):
        read_model({**config, setting: value})


def test_window_that_is_off_and_a_longer_context_are_read():
    config = model_config(QWEN, 0, "float32")
    harmless = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
    assert read_model({**config, **harmless}) == QWEN
    longer = read_model({**config, "max_position_embeddings": 40_960})
    assert longer == dataclasses.replace(QWEN, context=MAX_CONTEXT)


def test_tensors_that_do_not_fit_the_configuration_are_refused_by_name(tmp_path):
    (tmp_path / "model").mkdir()
    export_hugging_face(tmp_path / "model", make_trained_model(UNTIED, bpe_file(300)))
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    for change, named in (
        ({"intermediate_size": 128}, "mlp.gate_proj"),
        ({"num_key_value_heads": 1}, "self_attn.k_proj"),
        ({"tie_word_embeddings": True}, "lm_head"),
        ({"model_type": "qwen3"}, "self_attn.k_norm"),
    ):
        path.write_text(json.dumps({**config, **change}))
        with pytest.raises(StateError, match=named):
            import_folder(tmp_path / "model")
