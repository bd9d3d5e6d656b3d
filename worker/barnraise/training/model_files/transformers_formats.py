"""The formats of the transformers library by type of model, as data. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from barnraise.spec import ModelSpec
from barnraise.training.model_files.transformers_names import (
    GPT2_NAMES,
    LLAMA_NAMES,
    TransformersNames,
)


@dataclass(frozen=True)
class TransformersFormat:
    """How the transformers library stores models of one type.

    Attributes:
        model_type: the type's name in config.json, which GGUF files use too.
        model_class: the library's class.
        fields: the fields by which a model is of this type.
        names: of its tensors.
        settings: other fields of a model → their settings in config.json.
        defaults: fields → what they are where config.json lacks the setting.
        required: settings that must have one of these values, where they are given: others mean
            another model.
        derived: settings that must be like an attribute of the model, where they are given.
        written: settings → the values that exports have.
        end_settings: settings that hold the number of the token that ends a text.
        gguf_functions: functions of a GGUF writer → the attribute of a model that they write.
        pairs_neighbours: whether llama.cpp rotates neighbouring elements of a head, where the
            library has element i and element i + width / 2. Else both agree.
    """

    model_type: str
    model_class: str
    fields: Mapping[str, Any]
    names: TransformersNames
    settings: Mapping[str, str]
    defaults: Mapping[str, Any]
    required: Mapping[str, tuple[Any, ...]]
    written: Mapping[str, Any]
    end_settings: tuple[str, ...]
    gguf_functions: Mapping[str, str]
    derived: Mapping[str, str] = field(default_factory=dict[str, str])
    pairs_neighbours: bool = False

    @property
    def is_rotary(self) -> bool:
        """Whether positions rotate queries and keys."""
        return "rope_theta" in self.settings


# All of these compute GELU by the same tanh approximation.
GELU_NAMES = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate")
GPT2 = TransformersFormat(
    model_type="gpt2",
    model_class="GPT2LMHeadModel",
    fields={"architecture": "gpt2"},
    names=GPT2_NAMES,
    settings={
        "vocabulary": "vocab_size",
        "context": "n_positions",
        "width": "n_embd",
        "layers": "n_layer",
        "heads": "n_head",
    },
    defaults={"vocabulary": 50257, "context": 1024, "width": 768, "layers": 12, "heads": 12},
    required={
        "activation_function": GELU_NAMES,
        "layer_norm_epsilon": (ModelSpec.norm_epsilon,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
        "tie_word_embeddings": (True,),
    },
    derived={"n_inner": "hidden_width", "n_ctx": "context"},
    written={
        "activation_function": "gelu_new",
        "layer_norm_epsilon": ModelSpec.norm_epsilon,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": True,
    },
    end_settings=("bos_token_id", "eos_token_id", "pad_token_id"),
    gguf_functions={"add_layer_norm_eps": "norm_epsilon"},
)
LLAMA = TransformersFormat(
    model_type="llama",
    model_class="LlamaForCausalLM",
    fields={"architecture": "llama", "qk_norm": False},
    names=LLAMA_NAMES,
    settings={
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
    },
    defaults={
        "key_value_heads": 0,
        "head_size": 0,
        "norm_epsilon": 1e-6,
        "rope_theta": 10_000.0,
        "tied_head": False,
    },
    required={
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "use_sliding_window": (False,),
        "pretraining_tp": (1,),
        "partial_rotary_factor": (1, 1.0),
        "rope_interleaved": (False,),
        "is_llama_config": (True,),
    },
    written={
        "hidden_act": "silu",
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
    },
    # As pad_token_id, it would keep its embedding from being tuned.
    end_settings=("bos_token_id", "eos_token_id"),
    gguf_functions={
        "add_layer_norm_rms_eps": "norm_epsilon",
        "add_head_count_kv": "grouped_heads",
        "add_key_length": "head_width",
        "add_value_length": "head_width",
        "add_rope_dimension_count": "head_width",
        "add_rope_freq_base": "rope_theta",
    },
    pairs_neighbours=True,
)
QWEN3 = replace(
    LLAMA,
    model_type="qwen3",
    model_class="Qwen3ForCausalLM",
    fields={"architecture": "llama", "qk_norm": True},
    defaults={**LLAMA.defaults, "head_size": 128},
    pairs_neighbours=False,
)
FORMATS = (GPT2, LLAMA, QWEN3)


def format_of(model: ModelSpec) -> TransformersFormat:
    """Return the format of a model."""
    return next(
        each
        for each in FORMATS
        if all(getattr(model, name) == value for name, value in each.fields.items())
    )
