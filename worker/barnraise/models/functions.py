"""The functions that compute an architecture, by the model that they are wanted for."""

import torch.nn.functional as F
from torch import Tensor

from barnraise.models.gpt2 import GPT2Functions
from barnraise.models.llama import LlamaFunctions
from barnraise.models.weights import ModelFunctions, Weights
from barnraise.spec.model_dimensions import ModelDimensions

FUNCTIONS: dict[str, ModelFunctions] = {"gpt2": GPT2Functions(), "llama": LlamaFunctions()}


def functions_of(model: ModelDimensions) -> ModelFunctions:
    """Return the functions that compute a model."""
    return FUNCTIONS[model.architecture]


def head(final: Weights, table: Tensor, x: Tensor, model: ModelDimensions) -> Tensor:
    """Compute logits with the output table [V, d]: [B, T, d] → [B, T, V]."""
    return F.linear(functions_of(model).norm(final, "norm", x, model), table)
