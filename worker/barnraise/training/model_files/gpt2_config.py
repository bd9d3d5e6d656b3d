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
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "tie_word_embeddings": (True,),
    "tie_encoder_decoder": (False,),
    "torchscript": (False, True),
}
SHAPE = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner", "n_ctx")
# The settings by the names of the same sizes in a run's rules.
SETTINGS: dict[str, str] = dict(
    zip(("vocabulary", "context", "width", "layers", "heads"), SHAPE[:5], strict=True)
)


def model_config(model: ModelSpec, end_id: int, dtype: str) -> dict[str, Any]:
    """Return the content of config.json."""
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": model.vocabulary,
        "n_positions": model.context,
        "n_ctx": model.context,
        "n_embd": model.width,
        "n_layer": model.layers,
        "n_head": model.heads,
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
    check_settings(config, REQUIRED, SHAPE)
    # The defaults are those of the transformers library.
    defaults = (50257, 1024, 768, 12, 12)
    sizes = {
        name: read_size(config, name, default)
        for name, default in zip(SHAPE[:5], defaults, strict=True)
    }
    width, context = sizes["n_embd"], sizes["n_positions"]
    for name, value in (("n_inner", 4 * width), ("n_ctx", context)):
        if config.get(name) not in (None, value):
            raise StateError(
                f"the setting {name} of {CONFIG_FILE} is {config[name]!r}; a run trains {value}"
            )
    model = ModelSpec(
        layers=sizes["n_layer"],
        width=width,
        heads=sizes["n_head"],
        context=context,
        vocabulary=sizes["vocab_size"],
    )
    return check_model(model, SETTINGS)
