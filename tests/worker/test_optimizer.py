"""AdamW over flat buffers, against torch's own; and the schedule."""

import dataclasses

import pytest
import torch

from barnraise.spec import TENSOR_ALIGN, ModelSpec, Recipe, preset
from barnraise.swap.arena import Arena, Layer
from barnraise.swap.optimizer import BETA1, BETA2, EPSILON, AdamW, schedule, spans

ODD = ModelSpec(layers=2, width=20, heads=2, context=9, vocabulary=257)
DECAY, RATE = 0.1, 3e-3


def stirred(spec: ModelSpec, seed: int = 0) -> list[Layer]:
    layers, stir = Arena(spec, torch.device("cpu")).layers, torch.Generator().manual_seed(seed)
    for layer in layers:
        for parameter in layer.parameters.values():
            parameter.data.normal_(generator=stir)
    return layers


def some_gradient(layers: list[Layer], step: int) -> None:
    stir = torch.Generator().manual_seed(step)
    for layer in layers:
        for parameter in layer.parameters.values():
            parameter.grad.normal_(generator=stir)


def torch_adamw(layers: list[Layer], **kind) -> tuple[torch.optim.AdamW, list[torch.Tensor]]:
    """torch's own over clones of the parameters; its decay groups are by the tensors' rank."""
    clones = [parameter.detach().clone() for layer in layers for parameter in layer.parameters.values()]
    groups = [
        {"params": [clone for clone in clones if clone.dim() >= 2], "weight_decay": DECAY},
        {"params": [clone for clone in clones if clone.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=RATE, betas=(BETA1, BETA2), eps=EPSILON, **kind), clones


@pytest.mark.parametrize("clip", [None, 1.0])
def test_twenty_steps_match_torch_adamw_with_decay_on_matrices_alone(clip):
    layers = stirred(ODD)
    theirs, clones = torch_adamw(layers, foreach=False, fused=False)
    mine = AdamW(layers, DECAY)
    for step in range(20):
        some_gradient(layers, step)
        for clone, parameter in zip(clones, (p for la in layers for p in la.parameters.values()), strict=True):
            clone.grad = parameter.grad.clone()
        shrink = 1.0
        if clip:
            norm = torch.nn.utils.clip_grad_norm_(clones, clip).item()
            shrink = max(1.0, norm / clip)
        theirs.step()
        mine.step(RATE, shrink)
    for clone, parameter in zip(clones, (p for la in layers for p in la.parameters.values()), strict=True):
        torch.testing.assert_close(parameter.detach(), clone, rtol=2e-6, atol=2e-6)


def test_flat_buffers_give_the_same_bits_as_torch_fused_adamw_tensor_by_tensor():
    layers = stirred(preset("gpt-nano"))
    theirs, clones = torch_adamw(layers, fused=True)
    mine = AdamW(layers, DECAY)
    for step in range(3):
        some_gradient(layers, step)
        for clone, parameter in zip(clones, (p for la in layers for p in la.parameters.values()), strict=True):
            clone.grad = parameter.grad.clone()
        theirs.step()
        mine.step(RATE)
    for clone, parameter in zip(clones, (p for la in layers for p in la.parameters.values()), strict=True):
        assert torch.equal(parameter.detach(), clone)


def test_the_bits_do_not_depend_on_where_a_buffer_is_cut():
    spans_of_one_kind = stirred(ODD)
    whole = stirred(ODD)
    by_spans, moments = AdamW(spans_of_one_kind, 0.0), {}
    for step in range(1, 4):
        some_gradient(spans_of_one_kind, step)
        some_gradient(whole, step)
        by_spans.step(RATE)
        for layer in whole:
            moments.setdefault(layer.fragment.index, torch.zeros(())).add_(1)
            torch._fused_adamw_(
                *([tensor] for tensor in (layer.weights, layer.gradient, layer.m, layer.v)),
                [],
                [moments[layer.fragment.index]],
                lr=RATE, beta1=BETA1, beta2=BETA2, weight_decay=0.0, eps=EPSILON, amsgrad=False, maximize=False,
            )  # fmt: skip
    for cut, uncut in zip(spans_of_one_kind, whole, strict=True):
        assert torch.equal(cut.weights, uncut.weights) and torch.equal(cut.v, uncut.v)


@pytest.mark.parametrize("spec", [ODD, preset("gpt-nano"), preset("gpt2-1.5b"), preset("gpt3-175b")])
def test_spans_cover_a_fragment_once_in_order_and_decay_matrices_alone(spec):
    for fragment in spec.fragments():
        cut = spans(fragment)
        assert [begin for begin, _, _ in cut] == [0, *(end for _, end, _ in cut[:-1])] and cut[-1][1] == fragment.size
        assert all(begin % TENSOR_ALIGN == 0 and end % TENSOR_ALIGN == 0 for begin, end, _ in cut)
        for slot in fragment.slots:
            [decays] = [decays for begin, end, decays in cut if begin <= slot.offset < end]
            assert decays == (len(slot.shape) == 2)


def test_the_schedule_warms_up_peaks_once_and_ends_at_a_tenth():
    recipe = Recipe(token_budget=1_000_000, warmup_tokens=50_000)
    rates = [schedule(recipe, tokens) for tokens in range(0, 1_200_000, 1000)]
    assert 0 < rates[0] <= 0.2, "the first round must learn something: the ledger's clock stands still for all of it"
    assert max(rates) == rates[50] == 1.0
    assert rates[:51] == sorted(rates[:51]) and rates[50:] == sorted(rates[50:], reverse=True)
    assert rates[-1] == rates[1000] == pytest.approx(0.1)


def test_the_schedule_copes_with_no_warm_up_a_constant_and_a_warm_up_past_the_budget():
    assert schedule(Recipe(warmup_tokens=0), 0) == 1.0
    constant = dataclasses.replace(Recipe(), schedule="constant")
    assert schedule(constant, constant.token_budget * 2) == 1.0
    long = Recipe(token_budget=1000, warmup_tokens=5000)
    assert [schedule(long, tokens) < 1 for tokens in (0, 1000, 4999)] == [True] * 3
    assert schedule(long, 6000) == pytest.approx(0.1)
