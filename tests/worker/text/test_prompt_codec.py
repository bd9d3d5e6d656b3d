"""Prompts become tokens, and tokens become text that a terminal can show."""

import pytest
from helpers.worker.trained_models import SENTENCES, bpe_file

from barnraise.text.prompt_codec import PromptCodec, TextStream, make_printable

KINDS = {"bytes": None, "bpe": bpe_file()}


@pytest.fixture(params=KINDS)
def codec(request) -> PromptCodec:
    """Provide a codec of each kind."""
    return PromptCodec(KINDS[request.param])


def test_text_survives_its_tokens(codec):
    for text in (*SENTENCES, ""):
        assert codec.decode(codec.encode(text)) == text


def test_spelled_special_token_stays_text(codec):
    tokens = codec.encode("a<|endoftext|>b")
    assert codec.end not in tokens and codec.decode(tokens) == "a<|endoftext|>b"


def test_growing_text_shows_whole_characters_only(codec):
    text = "aä大\n" + "b" * 50 + "é"
    stream, shown = TextStream(codec, []), ""
    for token in codec.encode(text):
        stream.add(token)
        part = stream.next_text()
        assert "\ufffd" not in part
        shown += part
    assert shown + stream.next_text(is_complete=True) == text


def test_text_cut_within_a_character_ends_with_a_replacement():
    stream = TextStream(PromptCodec(None), list("ä".encode())[:1])
    assert stream.next_text() == "" and stream.next_text(is_complete=True) == "\ufffd"


def test_control_characters_and_direction_marks_are_replaced():
    assert make_printable("one\u2028two\u2029") == "one\ufffdtwo\ufffd", "no line of its own"
    assert make_printable("a\x1b[2J\tb\r\nc\rd\u202e\0") == "a\ufffd[2J\tb\nc\nd\ufffd\ufffd"
