"""The architectures by the names that specs have for them. Pure."""

from barnraise.spec.architecture import Architecture
from barnraise.spec.gpt2_architecture import GPT2Architecture
from barnraise.spec.llama_architecture import LlamaArchitecture
from barnraise.spec.model_dimensions import ModelDimensions

ARCHITECTURES: dict[str, Architecture] = {
    each.name: each for each in (GPT2Architecture(), LlamaArchitecture())
}


def architecture_of(model: ModelDimensions) -> Architecture:
    """Return the description of a model's architecture."""
    return ARCHITECTURES[model.architecture]
