"""The models that forms and commands offer by name, in families. Pure."""

from collections.abc import Mapping
from typing import Any

# (layers, width, heads, context), GPT-2 from Radford et al. 2019, GPT-3 from Brown et al. 2020,
# table 2.1. There the 13B model is 5,140 wide with 40 heads; 5,120 divides evenly.
_GPT_SHAPES = {
    "gpt-nano": (4, 128, 4, 128),
    "gpt-micro": (6, 256, 8, 256),
    "gpt-mini": (8, 512, 8, 512),
    "gpt2-124m": (12, 768, 12, 1024),
    "gpt2-355m": (24, 1024, 16, 1024),
    "gpt2-774m": (36, 1280, 20, 1024),
    "gpt2-1.5b": (48, 1600, 25, 1024),
    "gpt3-1.3b": (24, 2048, 16, 2048),
    "gpt3-2.7b": (32, 2560, 32, 2048),
    "gpt3-6.7b": (32, 4096, 32, 2048),
    "gpt3-13b": (40, 5120, 40, 2048),
    "gpt3-175b": (96, 12288, 96, 2048),
}
# (layers, width, heads, key-value heads, feed-forward width, context, vocabulary, rotary base,
# whether the head is tied), from the configurations that were published with the weights. A run
# trains without stretched positions, so the context is not the published one where that is longer
# than the positions were trained for: 131,072 of Llama 3.1 and 3.2 (8,192 without their "llama3"
# scaling), 40,960 of Qwen3 (4,096 for most of its training).
_LLAMA_SHAPES = {
    "llama-nano": (4, 128, 4, 2, 384, 128, 2048, 1e4, True),
    "llama-mini": (8, 512, 8, 4, 1408, 512, 2048, 1e4, True),
    "tinyllama-1.1b": (22, 2048, 32, 4, 5632, 2048, 32_000, 1e4, False),
    "llama3.2-1b": (16, 2048, 32, 8, 8192, 8192, 128_256, 5e5, True),
    "llama3.2-3b": (28, 3072, 24, 8, 8192, 8192, 128_256, 5e5, True),
    "llama3.1-8b": (32, 4096, 32, 8, 14336, 8192, 128_256, 5e5, False),
    "llama3.1-70b": (80, 8192, 64, 8, 28672, 8192, 128_256, 5e5, False),
}
_SMOLLM_SHAPES = {
    "smollm2-135m": (30, 576, 9, 3, 1536, 8192, 49_152, 1e5, True),
    "smollm2-360m": (32, 960, 15, 5, 2560, 8192, 49_152, 1e5, True),
    "smollm2-1.7b": (24, 2048, 32, 32, 8192, 8192, 49_152, 1.3e5, True),
}
_QWEN_SHAPES = {
    "qwen3-0.6b": (28, 1024, 16, 8, 3072, 4096, 151_936, 1e6, True),
    "qwen3-1.7b": (28, 2048, 16, 8, 6144, 4096, 151_936, 1e6, True),
    "qwen3-4b": (36, 2560, 32, 8, 9728, 4096, 151_936, 1e6, True),
    "qwen3-8b": (36, 4096, 32, 8, 12288, 4096, 151_936, 1e6, False),
}
_LLAMA_FIELDS = (
    *("layers", "width", "heads", "key_value_heads", "hidden"),
    *("context", "vocabulary", "rope_theta", "tied_head"),
)


def _gpt(name: str) -> dict[str, Any]:
    layers, width, heads, context = _GPT_SHAPES[name]
    vocabulary = 2048 if name.startswith("gpt-") else 50257
    return dict(layers=layers, width=width, heads=heads, context=context, vocabulary=vocabulary)


def _llama(shapes: Mapping[str, tuple[Any, ...]], **others: Any) -> dict[str, dict[str, Any]]:
    return {
        name: dict(zip(_LLAMA_FIELDS, shape, strict=True), architecture="llama", **others)
        for name, shape in shapes.items()
    }


# Family → name → the fields of its model.
FAMILIES: dict[str, dict[str, dict[str, Any]]] = {
    "GPT-2 and GPT-3": {name: _gpt(name) for name in _GPT_SHAPES},
    "Llama": _llama(_LLAMA_SHAPES),
    "SmolLM2": _llama(_SMOLLM_SHAPES),
    "Qwen3": _llama(_QWEN_SHAPES, head_size=128, norm_epsilon=1e-6, qk_norm=True),
}
