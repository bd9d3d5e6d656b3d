"""Llama's architecture computes what the transformers library computes with the same weights."""

import pytest
import torch
from helpers.worker.llama_models import (
    QWEN,
    UNTIED,
    random_fragments,
    transformers_model,
)
from helpers.worker.trained_models import logits_of

from barnraise.models.functions import functions_of
from barnraise.models.weights import KeyValueCache, views
from barnraise.spec import ModelSpec, preset

# The numbers of parameters that the published weights have.
PUBLISHED = {
    "tinyllama-1.1b": 1_100_048_384,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(name):
    assert preset(name).parameters == PUBLISHED[name]


@pytest.mark.integration
@pytest.mark.parametrize("model", [UNTIED, QWEN], ids=["llama", "qwen3"])
def test_logits_and_gradients_equal_those_of_transformers(model: ModelSpec):
    fragments = random_fragments(model)
    theirs = transformers_model(model, fragments)
    leaves = [flat.requires_grad_() for flat in fragments]
    tokens = torch.randint(model.vocabulary, (3, model.context))
    ours, expected = logits_of(model, leaves, tokens), theirs(tokens).logits
    assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()
    ours.square().mean().backward()
    expected.square().mean().backward()
    with torch.no_grad():
        gradients = transformers_model(model, [flat.grad for flat in leaves]).state_dict()
    for name, parameter in theirs.named_parameters():
        distance = (gradients[name] - parameter.grad).abs().max()
        assert distance <= 1e-5 * parameter.grad.abs().max(), name


@pytest.mark.parametrize("model", [UNTIED, QWEN], ids=["llama", "qwen3"])
def test_tokens_with_a_cache_give_the_stream_of_the_whole_sequence(model: ModelSpec):
    functions, flat = functions_of(model), random_fragments(model)[1]
    weights = views(model.fragments()[1], flat)
    x = torch.randn(1, 20, model.width)
    cache = KeyValueCache.empty(model, 20, torch.device("cpu"))
    parts = [functions.block(weights, part, model, cache) for part in x.split(7, dim=1)]
    whole = functions.block(weights, x, model)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-5, atol=1e-5)
    assert cache.keys.shape[1] == model.key_value_heads
