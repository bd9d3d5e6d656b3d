"""The formats of the transformers library by architecture. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from barnraise.errors import StateError
from barnraise.spec import Fragment, ModelSpec
from barnraise.training.model_files import gpt2_config, gpt2_names, llama_config, llama_names
from barnraise.training.model_files.transformers_config import CONFIG_FILE
from barnraise.training.model_files.transformers_tensor import TransformersTensor


@dataclass(frozen=True)
class TransformersFormat:
    """How the transformers library stores an architecture.

    Attributes:
        model_types: the model types of config.json that are of this architecture.
        prefix: of most tensors' names; some files lack it.
        table: the name of the table of tokens, without the prefix.
        ignored: endings of the names of tensors that old files store, and that are no weights.
        tensors: lists a fragment's tensors under their names there.
        model_config: returns the content of config.json; see `gpt2_config`.
        read_model: returns the architecture that a config.json describes; see `gpt2_config`.
    """

    model_types: tuple[str, ...]
    prefix: str
    table: str
    ignored: tuple[str, ...]
    tensors: Callable[[Fragment], list[TransformersTensor]]
    model_config: Callable[[ModelSpec, int, str], dict[str, Any]]
    read_model: Callable[[Mapping[str, Any]], ModelSpec]


FORMATS = {
    "gpt2": TransformersFormat(
        model_types=("gpt2",),
        prefix=gpt2_names.PREFIX,
        table="wte.weight",
        ignored=(".attn.bias", ".attn.masked_bias"),  # the causal mask
        tensors=gpt2_names.transformers_tensors,
        model_config=gpt2_config.model_config,
        read_model=gpt2_config.read_model,
    ),
    "llama": TransformersFormat(
        model_types=(llama_config.LLAMA, llama_config.QWEN3),
        prefix=llama_names.PREFIX,
        table="embed_tokens.weight",
        ignored=(".rotary_emb.inv_freq",),
        tensors=llama_names.transformers_tensors,
        model_config=llama_config.model_config,
        read_model=llama_config.read_model,
    ),
}


def format_of(model: ModelSpec) -> TransformersFormat:
    """Return the format of a model's architecture."""
    return FORMATS[model.architecture]


def read_model(config: Mapping[str, Any]) -> ModelSpec:
    """Return the architecture that a config.json describes, if we train exactly that one.

    Raises:
        StateError: Another model; the message names the setting.
    """
    kind = config.get("model_type")
    for transformers_format in FORMATS.values():
        if kind in transformers_format.model_types:
            return transformers_format.read_model(config)
    known = [f"'{each}'" for form in FORMATS.values() for each in form.model_types]
    experts = ", which is a mixture of experts" if "moe" in str(kind) or kind == "mixtral" else ""
    raise StateError(
        f"the setting model_type of {CONFIG_FILE} is {kind!r}{experts}; "
        f"runs start from models of the types {', '.join(known[:-1])} and {known[-1]}"
    )
