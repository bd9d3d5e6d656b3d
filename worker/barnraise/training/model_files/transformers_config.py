"""What the configuration files of all architectures share in the transformers library. Pure."""

from collections.abc import Collection, Mapping
from typing import Any

from barnraise.errors import StateError
from barnraise.spec import ModelSpec, model_problems

CONFIG_FILE, GENERATION_CONFIG_FILE = "config.json", "generation_config.json"
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

# Settings that must have this value in every architecture, where they are given.
REQUIRED_OF_ALL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "tie_encoder_decoder": (False,),
    "torchscript": (False, True),
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


def check_settings(
    config: Mapping[str, Any], required: Mapping[str, tuple[Any, ...]], read: Collection[str]
) -> None:
    """Refuse settings with which the weights compute something else than we do.

    Raises:
        StateError: The message names the setting.
    """
    required = {**REQUIRED_OF_ALL, **required}
    for name, value in config.items():
        if name in read or name in WITHOUT_EFFECT:
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


def read_size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return a size of a config.json.

    Raises:
        StateError: It is missing, or no whole number.
    """
    value = config.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise StateError(
            f"the setting {name} of {CONFIG_FILE} must be a whole number, not {value!r}"
        )
    return value


def check_model(model: ModelSpec, settings: Mapping[str, str]) -> ModelSpec:
    """Return a model that a run can train, before anything is sized by its numbers.

    Raises:
        StateError: No run trains such a model; the message names the setting.
    """
    for field, sentence in model_problems(model).items():
        name = field.removeprefix("model.")
        setting = settings.get(name, name)
        raise StateError(f"the setting {setting} of {CONFIG_FILE} is of no run: {sentence}")
    return model
