"""Private keys are recognised wherever they are in a text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.errors import TextError
from barnraise.text.private_keys import (
    head_holds_private_key,
    holds_private_key,
    is_first_line_of_key,
    refuse_private_keys,
)

KEYS = (
    "-----BEGIN PRIVATE KEY-----",
    "-----BEGIN OPENSSH PRIVATE KEY-----",
    "-----BEGIN PGP PRIVATE KEY BLOCK-----",
    "---- BEGIN SSH2 ENCRYPTED PRIVATE KEY ----",
    "AGE-SECRET-KEY-1" + "Q" * 58,
)
PUBLIC = ("-----BEGIN PUBLIC KEY-----", "a PRIVATE KEY is private", "AGE-SECRET-KEY-1 begins one")


def test_private_keys_and_nothing_else_are_recognised():
    assert all(holds_private_key(f"a\n{key}\nb") for key in KEYS)
    assert all(head_holds_private_key(f"a {key}".encode()) for key in KEYS)
    assert all(head_holds_private_key(key.encode("utf-16")) for key in KEYS)
    assert not any(holds_private_key(text) for text in PUBLIC)


@given(
    st.sampled_from(KEYS),
    st.lists(st.integers(0, 400), max_size=6).map(sorted),
    st.integers(0, 300),
)
def test_key_is_found_however_the_text_is_cut(key, cuts, before):
    text = "x" * before + key + "y" * 300
    ends = [*cuts, len(text)]
    pieces = [text[a:b] for a, b in zip([0, *cuts], ends, strict=True)]
    with pytest.raises(TextError, match="private key"):
        list(refuse_private_keys(pieces))
    reader = refuse_private_keys(pieces)
    before_key = [piece for piece, end in zip(pieces, ends, strict=True) if end <= before]
    assert [next(reader) for _ in before_key] == before_key
    assert list(refuse_private_keys([text.replace(key, "")])) == ["x" * before + "y" * 300]


def test_first_line_of_a_key_is_recognised_only_alone():
    assert all(is_first_line_of_key(f" {key}\n") for key in KEYS[:4])
    assert not any(is_first_line_of_key(f"{key} MII") for key in KEYS)
