"""Generated text is that of the whole model, whatever stays in memory, and seeds decide it."""

import pytest
import torch
from helpers.worker.trained_models import BYTES, compute_logits, make_trained_model

from barnraise.errors import StateError
from barnraise.swap.sampler import Sampler, SamplingSettings, TokenRange

TRAINED = make_trained_model(BYTES)
VOCABULARY = TokenRange(256, 0)
ALL = 1 << 30  # bytes: every layer stays in memory


class Weights:
    """Loads fragments and counts how often each is loaded."""

    def __init__(self) -> None:
        self.loads: list[int] = []

    def __call__(self, index: int) -> torch.Tensor:
        self.loads.append(index)
        return TRAINED.load(BYTES.fragments()[index])


def generate(
    *prompts: list[int], resident_bytes: int = 0, load=None, **settings
) -> list[list[int]]:
    """Return the generated tokens of each prompt."""
    sampler = Sampler(BYTES, load or Weights(), resident_bytes)
    answers: list[list[int]] = [[] for _ in prompts]
    for number, token in sampler.generate(prompts, SamplingSettings(**settings), VOCABULARY):
        answers[number].append(token)
    return answers


def greedy_reference(prompt: list[int], count: int) -> list[int]:
    """Return the likeliest continuation by whole forward passes without a cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(compute_logits(TRAINED, torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_greedy_text_is_that_of_whole_forward_passes():
    prompts = [[5, 9, 200], [77], list(range(1, 12))]
    expected = [greedy_reference(prompt, 10) for prompt in prompts]
    assert all(0 not in tokens for tokens in expected)
    for resident_bytes in (0, 60_000, ALL):
        got = generate(*prompts, tokens=10, temperature=0.0, resident_bytes=resident_bytes)
        assert got == expected, "prompts together, and any memory, change nothing"


def test_layers_load_once_a_token_unless_they_stay():
    streamed, resident = Weights(), Weights()
    generate([1], [2, 3], tokens=6, temperature=0.0, load=streamed)
    assert streamed.loads == [0, 3, *[1, 2] * 6]
    generate([1], [2, 3], tokens=6, temperature=0.0, load=resident, resident_bytes=ALL)
    assert resident.loads == [0, 3, 1, 2]


def test_text_longer_than_the_context_goes_on():
    (text,) = generate([65], tokens=3 * BYTES.context, temperature=1.0, top_p=1.0, seed=4)
    assert BYTES.context < len(text) <= 3 * BYTES.context
    (answer,) = generate(list(range(1, 60)), tokens=4, temperature=0.0)
    assert answer[0] == greedy_reference(list(range(1, 60))[-BYTES.context :], 1)[0]


def test_seed_decides_the_text_of_each_prompt():
    settings = {"tokens": 12, "temperature": 1.0, "top_p": 1.0}
    first = generate([10], [20], seed=1, **settings)
    assert first == generate([10], [20], seed=1, **settings)
    assert first != generate([10], [20], seed=2, **settings)
    assert generate([20], seed=2, **settings)[0] == first[1], "others do not change a prompt's text"


def test_top_p_and_vocabulary_limit_what_is_chosen():
    greedy = generate([10], tokens=8, temperature=0.0)
    assert generate([10], tokens=8, temperature=5.0, top_p=1e-6, seed=3) == greedy
    sampler = Sampler(BYTES, Weights())
    tokens = sampler.generate([[1]], SamplingSettings(20, 50.0, 1.0), TokenRange(7, 255))
    assert {token for _, token in tokens} <= set(range(7))


def test_end_token_ends_the_text_and_begins_an_empty_prompt():
    first = greedy_reference([0], 1)[0]
    assert generate([], tokens=1, temperature=0.0) == [[first]]
    sampler = Sampler(BYTES, Weights())
    ended = list(sampler.generate([[0]], SamplingSettings(9, 0.0), TokenRange(256, first)))
    assert ended == []


def test_diverged_weights_are_a_sentence():
    def load(index: int) -> torch.Tensor:
        return torch.full((BYTES.fragments()[index].size,), float("nan"))

    with pytest.raises(StateError, match="diverged"):
        generate([1], tokens=1, load=load)
