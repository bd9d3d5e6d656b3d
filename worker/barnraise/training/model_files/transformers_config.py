"""Write the configuration files of the transformers library, and read those of others. Pure."""

import math
from collections.abc import Mapping
from typing import Any

from barnraise.errors import StateError
from barnraise.spec import MAX_CONTEXT, ModelSpec, model_problems
from barnraise.training.model_files.transformers_formats import (
    FORMATS,
    TransformersFormat,
    format_of,
)

CONFIG_FILE, GENERATION_CONFIG_FILE = "config.json", "generation_config.json"
# Settings that do not change what the weights compute. Dropout is one of them: we train without it.
WITHOUT_EFFECT = {
    "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache", "_name_or_path",
    "initializer_range", "resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout",
    "gradient_checkpointing",
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

# Settings of rotary models that other settings make ineffective; `_check_attention` reads those.
ROTARY_SETTINGS = (
    *("rope_scaling", "rope_parameters"),
    *("layer_types", "sliding_window", "max_window_layers"),
)
# Settings that must have this value in every architecture, where they are given.
REQUIRED_OF_ALL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "tie_encoder_decoder": (False,),
    "torchscript": (False, True),
}


def model_config(model: ModelSpec, end_id: int, dtype: str) -> dict[str, Any]:
    """Return the content of config.json."""
    form = format_of(model)
    explicit = {
        "key_value_heads": model.grouped_heads,
        "head_size": model.head_width,
        "hidden": model.hidden_width,
    }
    return {
        "model_type": form.model_type,
        "architectures": [form.model_class],
        **{
            setting: explicit.get(name, getattr(model, name))
            for name, setting in form.settings.items()
        },
        **form.written,
        **dict.fromkeys(form.end_settings, end_id),
        "torch_dtype": dtype,
    }


def generation_config(model: ModelSpec, end_id: int) -> dict[str, Any]:
    """Return the content of generation_config.json: text ends before the model's context does.

    Of a `max_length` transformers would warn at each call that names `max_new_tokens`.
    """
    return {
        "bos_token_id": end_id,
        "eos_token_id": end_id,
        "pad_token_id": end_id,
        "max_new_tokens": model.context // 2,
    }


def read_model(config: Mapping[str, Any]) -> ModelSpec:
    """Return the architecture that a config.json describes, if we train exactly that one.

    A run attends to `MAX_CONTEXT` tokens at most: plain rotary positions compute the same function
    for the first tokens of a longer context.

    Raises:
        StateError: Another model; the message names the setting.
    """
    form = _find_format(config.get("model_type"))
    _check_settings(config, form)
    given = {name: value for name, value in config.items() if value is not None}
    if form.is_rotary:
        _check_attention(config)
        given = {**(config.get("rope_parameters") or config.get("rope_scaling") or {}), **given}
    values = {name: _read_field(given, form, name) for name in form.settings}
    if form.is_rotary:
        values["context"] = min(values["context"], MAX_CONTEXT)
        if values["head_size"] * values["heads"] == values["width"]:
            values["head_size"] = 0
    model = ModelSpec(**form.fields, **values)
    # Check it before anything is sized by its numbers.
    for name, sentence in model_problems(model).items():
        name = name.removeprefix("model.")
        raise StateError(
            f"the setting {form.settings.get(name, name)} of {CONFIG_FILE} is of no run: {sentence}"
        )
    for setting, attribute in form.derived.items():
        value = getattr(model, attribute)
        if given.get(setting, value) != value:
            raise StateError(
                f"the setting {setting} of {CONFIG_FILE} is {config[setting]!r}; "
                f"a run trains {value}"
            )
    return model


def _find_format(kind: object) -> TransformersFormat:
    for form in FORMATS:
        if form.model_type == kind:
            return form
    *known, last = (f"'{form.model_type}'" for form in FORMATS)
    experts = ", which is a mixture of experts" if "moe" in str(kind) or kind == "mixtral" else ""
    raise StateError(
        f"the setting model_type of {CONFIG_FILE} is {kind!r}{experts}; "
        f"runs start from models of the types {', '.join(known)} and {last}"
    )


def _check_settings(config: Mapping[str, Any], form: TransformersFormat) -> None:
    """Refuse settings with which the weights compute something else than we do, by name."""
    required = {**REQUIRED_OF_ALL, **form.required}
    read = {"model_type", *form.settings.values(), *form.derived, *WITHOUT_EFFECT}
    if form.is_rotary:
        read.update(ROTARY_SETTINGS)
    for name, value in config.items():
        if name in read:
            continue
        if name in required:
            if value in required[name] and not (value is None or isinstance(value, list)):
                continue
            wanted = " or ".join(repr(choice) for choice in required[name])
            raise StateError(
                f"the setting {name} of {CONFIG_FILE} is {value!r}; a run trains only {wanted}"
            )
        if value:  # what is off, empty or null has no effect
            raise StateError(
                f"the setting {name} of {CONFIG_FILE} ({str(value)[:40]!r}) is not one that runs "
                "train"
            )


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
    kinds = config.get("layer_types") or []
    differs = not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)
    slides = config.get("use_sliding_window", True) and config.get("sliding_window")
    if differs or slides:
        name = "layer_types" if differs else "sliding_window"
        raise StateError(
            f"the setting {name} of {CONFIG_FILE} ({str(config[name])[:40]}) limits attention to a "
            "sliding window: a run trains attention to all earlier tokens"
        )


def _read_field(given: Mapping[str, Any], form: TransformersFormat, name: str) -> Any:
    """Return a field of a model from its setting, or its default.

    Raises:
        StateError: It is missing, or of another type.
    """
    setting = form.settings[name]
    if setting not in given and name in form.defaults:
        return form.defaults[name]
    value: Any = given.get(setting)
    like = getattr(ModelSpec, name, 0)
    if isinstance(like, bool):
        return bool(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(like, float) and is_number:
        return float(value) if abs(value) < 1e300 else math.inf
    if is_number and isinstance(value, int) and value >= 1:
        return value
    wanted = "number" if isinstance(like, float) else "whole number"
    raise StateError(f"the setting {setting} of {CONFIG_FILE} must be a {wanted}, not {value!r}")
