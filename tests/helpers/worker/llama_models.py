"""Small models of Llama's architecture, and the same models in the transformers library."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from barnraise.models.weights import views
from barnraise.spec import ModelSpec
from barnraise.training.model_files.transformers_config import model_config
from barnraise.training.model_files.transformers_formats import format_of

UNTIED = ModelSpec(
    architecture="llama",
    layers=2,
    width=64,
    heads=4,
    key_value_heads=2,
    hidden=176,
    context=32,
    vocabulary=300,
    tied_head=False,
)
QWEN = ModelSpec(
    architecture="llama",
    layers=2,
    width=48,
    heads=4,
    key_value_heads=1,
    head_size=32,
    hidden=128,
    context=32,
    vocabulary=300,
    rope_theta=1e6,
    norm_epsilon=1e-6,
    qk_norm=True,
)


def random_fragments(model: ModelSpec, seed: int = 0) -> list[Tensor]:
    """Create random weights, fp32 [n] of each fragment; norms are near one."""
    generator = torch.Generator().manual_seed(seed)
    flats = []
    for fragment in model.fragments():
        flat = torch.zeros(fragment.size)
        for slot in fragment.slots:
            values = torch.randn(slot.size, generator=generator) * 0.1
            flat[slot.offset : slot.offset + slot.size] = values + (slot.kind == "norm")
        flats.append(flat)
    return flats


def transformers_model(model: ModelSpec, fragments: Sequence[Tensor]) -> Any:
    """Create the transformers library's model with these weights."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    kinds = (Qwen3Config, Qwen3ForCausalLM) if model.qk_norm else (LlamaConfig, LlamaForCausalLM)
    config_class, model_class = kinds
    config = model_config(model, 0, "float32")
    theirs = model_class(config_class(**config)).eval()
    state = theirs.state_dict()
    with torch.no_grad():
        for fragment, flat in zip(model.fragments(), fragments, strict=True):
            weights = views(fragment, flat)
            for tensor in format_of(model).names.tensors(fragment):
                state[tensor.name].copy_(tensor.view(weights))
    return theirs
