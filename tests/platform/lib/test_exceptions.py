"""Test errors that reach a person as a sentence."""

import pytest

from coordinator.lib.exceptions import UserError


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("the code is expired", "The code is expired."),
        ("who are you?", "Who are you?"),
        ("https://a.example.org has no mirror list", "https://a.example.org has no mirror list."),
        ("", "."),
    ],
)
def test_error_becomes_a_sentence_and_an_address_stays(text, sentence):
    assert UserError(text).sentence == sentence
