"""Write GPT-2's configuration file of the transformers library, and read that of others. Pure."""

from collections.abc import Mapping
from typing import Any

from barnraise.errors import StateError
from barnraise.models.gpt2 import NORM_EPSILON
from barnraise.spec import ModelSpec
from barnraise.training.model_files.transformers_config import (
    CONFIG_FILE,
    check_model,
    check_settings,
    read_size,
)

# All of these compute GELU by the same tanh approximation.
GELU_NAMES = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate")
# Settings that must have this value, where they are given: others mean another model.
REQUIRED: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": GELU_NAMES,
    "layer_norm_epsilon": (NORM_EPSILON,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "tie_word_embeddings": (True,),
}
# Fields of a model → the settings that they are read from, and the library's own defaults.
SETTINGS = {
    "vocabulary": "vocab_size",
    "context": "n_positions",
    "width": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
}
DEFAULTS = {"vocabulary": 50257, "context": 1024, "width": 768, "layers": 12, "heads": 12}
READ = (*SETTINGS.values(), "n_inner", "n_ctx")


def model_config(model: ModelSpec, end_id: int, dtype: str) -> dict[str, Any]:
    """Return the content of config.json."""
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        **{setting: getattr(model, name) for name, setting in SETTINGS.items()},
        "n_ctx": model.context,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": NORM_EPSILON,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": True,
        "bos_token_id": end_id,
        "eos_token_id": end_id,
        "pad_token_id": end_id,
        "torch_dtype": dtype,
    }


def read_model(config: Mapping[str, Any]) -> ModelSpec:
    """Return the architecture that a config.json describes, if we train exactly that one.

    Raises:
        StateError: Another model; the message names the setting.
    """
    check_settings(config, REQUIRED, READ)
    sizes: dict[str, Any] = {
        name: read_size(config, setting, DEFAULTS[name]) for name, setting in SETTINGS.items()
    }
    for setting, value in (("n_inner", 4 * sizes["width"]), ("n_ctx", sizes["context"])):
        if config.get(setting) not in (None, value):
            raise StateError(
                f"the setting {setting} of {CONFIG_FILE} is {config[setting]!r}; "
                f"a run trains {value}"
            )
    return check_model(ModelSpec(**sizes), SETTINGS)
