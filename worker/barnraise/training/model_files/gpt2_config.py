"""Write GPT-2's configuration files of the transformers library, and read those of others. Pure."""

from collections.abc import Mapping
from typing import Any

from barnraise.errors import StateError
from barnraise.models.gpt2 import NORM_EPSILON
from barnraise.spec import ModelSpec, model_problems

CONFIG_FILE, GENERATION_CONFIG_FILE = "config.json", "generation_config.json"
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
SETTINGS = dict(zip(("vocabulary", "context", "width", "layers", "heads"), SHAPE[:5], strict=True))
# Settings that do not change what the weights compute. Dropout is one of them: we train without it.
WITHOUT_EFFECT = {
    "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache", "_name_or_path",
    "initializer_range", "resid_pdrop", "embd_pdrop", "attn_pdrop", "gradient_checkpointing",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id",
    "decoder_start_token_id", "tokenizer_class", "prefix", "finetuning_task", "problem_type",
    "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
    "summary_first_dropout", "task_specific_params", "id2label", "label2id", "num_labels",
    "_num_labels", "output_attentions", "output_hidden_states", "return_dict", "output_past",
    "return_dict_in_generate", "output_scores", "use_return_dict", "chunk_size_feed_forward",
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
    "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "diversity_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
    "num_return_sequences", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens",
    "begin_suppress_tokens", "remove_invalid_values", "exponential_decay_length_penalty",
    "_attn_implementation", "attn_implementation", "_attn_implementation_autoset", "use_bfloat16",
    "tf_legacy_loss", "predict_special_tokens", "is_composition", "model_name", "license",
}  # fmt: skip


def model_config(model: ModelSpec, end_id: int, dtype: str) -> dict[str, Any]:
    """Return the content of config.json.

    Args:
        model: the architecture.
        end_id: the number of the token after each document.
        dtype: of the weights' file: "float32" or "bfloat16".
    """
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


def generation_config(model: ModelSpec, end_id: int) -> dict[str, Any]:
    """Return the content of generation_config.json: text ends at the model's context."""
    return {
        "bos_token_id": end_id,
        "eos_token_id": end_id,
        "pad_token_id": end_id,
        "max_length": model.context,
    }


def read_model(config: Mapping[str, Any]) -> ModelSpec:
    """Return the architecture that a config.json describes, if we train exactly that one.

    Raises:
        StateError: Another model; the message names the setting.
    """
    if config.get("model_type") != "gpt2":
        raise StateError(
            f"the setting model_type of {CONFIG_FILE} is {config.get('model_type')!r}; "
            "runs start from models of the type 'gpt2'"
        )
    for name, value in config.items():
        _check_setting(name, value)
    sizes = {name: _read_size(config, name) for name in SHAPE[:5]}
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
    # Before anything is sized by the numbers.
    for field, sentence in model_problems(model).items():
        setting = SETTINGS[field.removeprefix("model.")]
        raise StateError(f"the setting {setting} of {CONFIG_FILE} is of no run: {sentence}")
    return model


def _check_setting(name: str, value: Any) -> None:
    """Refuse a setting with which the weights compute something else than we do."""
    if name in SHAPE or name in WITHOUT_EFFECT:
        return
    if name in REQUIRED:
        if value in REQUIRED[name] and not (value is None or isinstance(value, list)):
            return
        wanted = " or ".join(repr(choice) for choice in REQUIRED[name])
        raise StateError(
            f"the setting {name} of {CONFIG_FILE} is {value!r}; a run trains only {wanted}"
        )
    if value:  # what is off, empty or null has no effect
        raise StateError(
            f"the setting {name} of {CONFIG_FILE} ({str(value)[:40]!r}) is not one that runs train"
        )


def _read_size(config: Mapping[str, Any], name: str) -> int:
    """Return a size; the defaults are those of the transformers library."""
    defaults = {
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
    }
    value = config.get(name, defaults[name])
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise StateError(
            f"the setting {name} of {CONFIG_FILE} must be a whole number, not {value!r}"
        )
    return value
