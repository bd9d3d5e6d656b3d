"""A configuration is read if a run trains exactly that model, else refused by its setting."""

import pytest

from barnraise.errors import StateError
from barnraise.spec import ModelSpec
from barnraise.training.model_files.transformers_config import model_config, read_model

MODEL = ModelSpec(layers=2, width=32, heads=4, context=24, vocabulary=300)
CONFIG = model_config(MODEL, 0, "float32")


def test_own_configuration_reads_back_as_the_model():
    assert read_model(CONFIG) == MODEL
    assert read_model({"model_type": "gpt2"}) == ModelSpec(12, 768, 12, 1024, 50257)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("model_type", "gpt_neox"),
        ("activation_function", "relu"),
        ("activation_function", "gelu"),
        ("activation_function", None),
        ("layer_norm_epsilon", 1e-6),
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
        ("reorder_and_upcast_attn", True),
        ("add_cross_attention", True),
        ("tie_word_embeddings", False),
        ("n_inner", 64),
        ("n_ctx", 48),
        ("n_head", 5),
        ("n_layer", 10**9),
        ("vocab_size", 10**9),
        ("n_layer", "2"),
        ("n_embd", True),
        ("parallel_attn", True),
        ("use_parallel_residual", True),
        ("multi_query", True),
        ("rope_theta", 10000.0),
        ("rotary_pct", 0.25),
        ("sliding_window", 128),
        ("quantization_config", {"bits": 4}),
        ("tie_word_embeddings", []),
    ],
)
def test_setting_that_runs_do_not_train_is_refused_by_its_name(setting, value):
    with pytest.raises(StateError, match=setting):
        read_model({**CONFIG, setting: value})


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("activation_function", "gelu_pytorch_tanh"),
        ("n_inner", 128),
        ("n_inner", None),
        ("attn_pdrop", 0.1),
        ("task_specific_params", {"text-generation": {"do_sample": True}}),
        ("use_cache", False),
        ("transformers_version", "4.1"),
        ("parallel_attn", False),
        ("pruned_heads", {}),
    ],
)
def test_setting_without_an_effect_is_read(setting, value):
    assert read_model({**CONFIG, setting: value}) == MODEL
