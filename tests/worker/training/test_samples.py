"""Samples: one of the linked machines writes them, and every text can be sent and shown."""

import pytest
from helpers.worker.plans import TINY, engine_of, tiny_plan
from helpers.worker.trained_models import bpe_file

from barnraise.planning.memory_model import SAMPLE_TOKENS, between_steps, sampled_at_once
from barnraise.protocol.reports import SAMPLE_LENGTH
from barnraise.training.samples import SampleWriter, is_elected

KEYS = ["a" * 64, "b" * 64, "c" * 64]


def test_one_of_linked_machines_is_elected_and_all_in_turn():
    elected = {
        milestone: [key for key in KEYS if is_elected(key, set(KEYS) - {key}, milestone)]
        for milestone in range(30)
    }
    assert all(len(keys) == 1 for keys in elected.values())
    assert {keys[0] for keys in elected.values()} == set(KEYS)
    assert is_elected(KEYS[0], [], 7), "a machine alone writes them always"


@pytest.mark.parametrize("kind", ["resident", "exact"])
def test_samples_continue_each_prompt_with_the_anchor(kind, tmp_path):
    engine = engine_of(tiny_plan(kind), tmp_path / "state")
    prompts = [[5, 9, 200], [77], list(range(64, 256))]
    writer = SampleWriter(prompts, bpe_file(300), TINY.vocabulary, seed=5)
    samples = writer.write(engine, 4_000, 1e9, lambda: False)
    engine.close()
    assert samples.tokens == 4_000 and [text.prompt for text in samples.texts] == [0, 1, 2]
    for sample in samples.texts:
        assert 0 < len(sample.text) <= SAMPLE_LENGTH


def test_samples_end_when_the_worker_leaves(tmp_path):
    engine = engine_of(tiny_plan())
    polled = []
    writer = SampleWriter([[97], [98]], None, TINY.vocabulary, seed=1)
    samples = writer.write(engine, 0, 1e9, lambda: len(polled) > 6 or polled.append(1))
    engine.close()
    assert len(polled) == 7 and len(samples.texts) == 2
    assert sum(len(sample.text) for sample in samples.texts) <= 8


def test_memory_for_samples_is_planned():
    plan = tiny_plan(model=TINY)
    assert 1 <= sampled_at_once(plan) <= 5 and between_steps(plan) > 0 < SAMPLE_TOKENS
