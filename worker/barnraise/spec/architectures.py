"""The architectures by the names that specs have for them. Pure."""

from barnraise.spec.architecture import Architecture
from barnraise.spec.gpt2_architecture import GPT2Architecture
from barnraise.spec.model_dimensions import ModelDimensions

GPT2 = GPT2Architecture()


def architecture_of(model: ModelDimensions) -> Architecture:
    """Return the description of a model's architecture."""
    return GPT2
