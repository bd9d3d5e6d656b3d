"""Validation and text of a Llama, layer by layer, are those of the whole model."""

from dataclasses import replace

import pytest
import torch
from helpers.worker.llama_models import QWEN, UNTIED
from helpers.worker.plans import bitwise, from_disk
from helpers.worker.trained_models import logits_of

from barnraise.swap.precision import units_to_float
from barnraise.swap.sampler import SamplingSettings, TokenRange

MODELS = pytest.mark.parametrize("model", [UNTIED, QWEN], ids=["untied", "qwen"])


def initial_weights(model):
    return [units_to_float(bitwise.initial_units(fragment)) for fragment in model.fragments()]


@MODELS
@pytest.mark.parametrize("on_disk", [False, True])
def test_validation_loss_is_that_of_the_whole_model(model, on_disk, tmp_path):
    plan = bitwise.resident_plan(model)
    if on_disk:
        plan = replace(from_disk(plan), gradient_slots=2)
    engine = bitwise.open_engine(plan, tmp_path if on_disk else None)
    try:
        tokens = torch.randint(model.vocabulary, (5, model.context + 1))
        with torch.no_grad():
            logits = logits_of(model, initial_weights(model), tokens[:, :-1])
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        assert engine.evaluate([tokens]) == pytest.approx(expected.item(), rel=1e-5)
    finally:
        engine.close()


@MODELS
def test_greedy_text_is_that_of_the_whole_model(model):
    engine = bitwise.open_engine(bitwise.resident_plan(model))
    try:
        prompts = [[5, 6, 7], [200]]
        settings = SamplingSettings(tokens=6, temperature=0.0)
        words = TokenRange(model.vocabulary, model.vocabulary)
        texts = [list(prompt) for prompt in prompts]
        for number, token in engine.generate(prompts, settings, words):
            texts[number].append(token)
        for prompt, text in zip(prompts, texts, strict=True):
            assert len(text) == len(prompt) + 6
            with torch.no_grad():
                logits = logits_of(model, initial_weights(model), torch.tensor([text[:-1]]))
            assert text[len(prompt) :] == logits[0, len(prompt) - 1 :].argmax(-1).tolist()
    finally:
        engine.close()
