"""Write the configuration file of a Llama or Qwen3 for transformers, and read others'. Pure."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from barnraise.errors import StateError
from barnraise.spec import MAX_CONTEXT, ModelSpec
from barnraise.training.model_files.transformers_config import (
    CONFIG_FILE,
    check_model,
    check_settings,
    read_size,
)

LLAMA, QWEN3 = "llama", "qwen3"  # model types; the second has norms of queries and keys
# Fields of a model → the settings that they are read from.
SETTINGS = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "key_value_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "hidden": "intermediate_size",
    "context": "max_position_embeddings",
    "vocabulary": "vocab_size",
    "norm_epsilon": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "tied_head": "tie_word_embeddings",
}
# Settings that must have this value, where they are given: others mean another model.
REQUIRED: dict[str, tuple[Any, ...]] = {
    "model_type": (LLAMA, QWEN3),
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "pretraining_tp": (1,),
    "partial_rotary_factor": (1, 1.0),
    "rope_interleaved": (False,),
    "is_llama_config": (True,),
}
# Settings that other settings make ineffective; `_check_attention` reads those.
READ = {
    *SETTINGS.values(),
    *("rope_scaling", "rope_parameters", "layer_types", "sliding_window", "max_window_layers"),
    "attention_dropout",
}


def model_config(model: ModelSpec, end_id: int, dtype: str) -> dict[str, Any]:
    """Return the content of config.json."""
    sizes = dataclasses.asdict(model) | {
        "key_value_heads": model.key_value_width // model.head_width,
        "head_size": model.head_width,
        "hidden": model.hidden_width,
    }
    return {
        "model_type": QWEN3 if model.qk_norm else LLAMA,
        "architectures": ["Qwen3ForCausalLM" if model.qk_norm else "LlamaForCausalLM"],
        **{setting: sizes[field] for field, setting in SETTINGS.items()},
        "hidden_act": "silu",
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": end_id,
        "eos_token_id": end_id,  # as pad_token_id, it would keep its embedding from being tuned
        "torch_dtype": dtype,
    }


def read_model(config: Mapping[str, Any]) -> ModelSpec:
    """Return the architecture that a config.json describes, if we train exactly that one.

    A run attends to `MAX_CONTEXT` tokens at most: plain rotary positions compute the same function
    for the first tokens of a longer context.

    Raises:
        StateError: Another model; the message names the setting.
    """
    check_settings(config, REQUIRED, READ)
    _check_attention(config)
    sizes = {
        field: read_size(config, SETTINGS[field])
        for field in ("layers", "width", "heads", "hidden", "context", "vocabulary")
    }
    heads = sizes["heads"]
    head_size = config.get("head_dim")
    if head_size is None:  # of Qwen3 the library's own default
        head_size = 128 if config["model_type"] == QWEN3 else sizes["width"] // heads
    sizes["context"] = min(sizes["context"], MAX_CONTEXT)
    model = ModelSpec(
        **sizes,
        architecture="llama",
        key_value_heads=read_size(config, "num_key_value_heads", heads),
        head_size=0 if head_size * heads == sizes["width"] else head_size,
        rope_theta=_read_theta(config),
        norm_epsilon=_read_float(config, "rms_norm_eps", 1e-6),
        qk_norm=config["model_type"] == QWEN3,
        tied_head=bool(config.get("tie_word_embeddings", False)),
    )
    return check_model(model, SETTINGS)


def _check_attention(config: Mapping[str, Any]) -> None:
    """Refuse scaled rotary positions and sliding windows, by name."""
    for name in ("rope_scaling", "rope_parameters"):
        setting = config.get(name) or {}
        if not isinstance(setting, Mapping):
            raise StateError(f"the setting {name} of {CONFIG_FILE} is no JSON object")
        kind = setting.get("rope_type", setting.get("type", "default"))
        if kind != "default":
            raise StateError(
                f"the setting {name} of {CONFIG_FILE} scales rotary positions ({str(kind)[:40]!r}):"
                " a run trains plain ones"
            )
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    slides = config.get("use_sliding_window", True) and config.get("sliding_window")
    if kinds or slides:
        name = "layer_types" if kinds else "sliding_window"
        raise StateError(
            f"the setting {name} of {CONFIG_FILE} ({str(config[name])[:40]}) limits attention to a "
            "sliding window: a run trains attention to all earlier tokens"
        )


def _read_theta(config: Mapping[str, Any]) -> float:
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return _read_float(config if "rope_theta" in config else parameters, "rope_theta", 10_000.0)


def _read_float(config: Mapping[str, Any], name: str, default: float) -> float:
    value = config.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise StateError(f"the setting {name} of {CONFIG_FILE} must be a number, not {value!r}")
    return float(value)
