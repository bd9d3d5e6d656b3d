"""Test how a budget is compared with its text."""

import pytest

from coordinator.runs.spec_form import spec_from_fields
from coordinator.web.text_facts import TextFacts
from coordinator.web.text_size import text_size


def test_prepared_text_states_how_often_the_budget_reads_it():
    spec = spec_from_fields({"recipe.token_budget": "6M", "text.source": "files"})
    size = text_size(spec, TextFacts(1_400_000, 20_000, None, 0))
    assert size and size.tokens == 1_400_000 and not size.is_estimate
    assert size.passes == pytest.approx(4.286, rel=1e-3) and not size.is_repeated_much
    repeated = text_size(spec, TextFacts(500_000, 9_000, None, 0))
    assert repeated and repeated.is_repeated_much


def test_size_is_unknown_of_files_and_estimated_of_the_library():
    assert text_size(spec_from_fields({"text.source": "files"}), None) is None
    as_bytes = text_size(spec_from_fields({"text.tokenizer": "bytes"}), None)
    as_tokens = text_size(spec_from_fields({}), None)
    more_words = text_size(spec_from_fields({"model.vocabulary": 30_000}), None)
    assert as_bytes and as_tokens and more_words and as_bytes.is_estimate
    assert 12_000_000 < as_bytes.tokens < 12_600_000
    assert 3_500_000 < as_tokens.tokens < 4_500_000
    assert more_words.tokens < as_tokens.tokens
