"""The formats of the transformers library by architecture. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from barnraise.errors import StateError
from barnraise.spec import ModelSpec
from barnraise.training.model_files import gpt2_config, llama_config
from barnraise.training.model_files.transformers_config import CONFIG_FILE
from barnraise.training.model_files.transformers_names import (
    GPT2_NAMES,
    LLAMA_NAMES,
    TransformersNames,
)


@dataclass(frozen=True)
class TransformersFormat:
    """How the transformers library stores an architecture.

    Attributes:
        model_types: the model types of config.json that are of this architecture.
        names: of its tensors.
        model_config: returns the content of config.json; see `gpt2_config`.
        read_model: returns the architecture that a config.json describes; see `gpt2_config`.
    """

    model_types: tuple[str, ...]
    names: TransformersNames
    model_config: Callable[[ModelSpec, int, str], dict[str, Any]]
    read_model: Callable[[Mapping[str, Any]], ModelSpec]


FORMATS = {
    "gpt2": TransformersFormat(
        ("gpt2",), GPT2_NAMES, gpt2_config.model_config, gpt2_config.read_model
    ),
    "llama": TransformersFormat(
        (llama_config.LLAMA, llama_config.QWEN3),
        LLAMA_NAMES,
        llama_config.model_config,
        llama_config.read_model,
    ),
}


def format_of(model: ModelSpec) -> TransformersFormat:
    """Return the format of a model's architecture."""
    return FORMATS[model.architecture]


def model_type_of(model: ModelSpec) -> str:
    """Return the library's name of a model's architecture, which GGUF files use too."""
    return format_of(model).model_config(model, 0, "float32")["model_type"]


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
