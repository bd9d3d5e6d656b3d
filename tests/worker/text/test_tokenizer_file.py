"""An owner's tokenizer file is checked before its library reads it, and known kinds are read."""

import json

import pytest
from helpers.drill_modules import import_drill_module
from helpers.worker.trained_models import bpe_file
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer
from tokenizers import decoders as dec
from tokenizers import normalizers as norm
from tokenizers import pre_tokenizers as pre
from tokenizers.models import BPE, Unigram, WordPiece

from barnraise.errors import TextError
from barnraise.spec import MAX_VOCABULARY
from barnraise.text.tokenizer import load_tokenizer, tokenizer_errors
from barnraise.text.tokenizer_file import PATTERNS, read_tokenizer_file

owner_files = import_drill_module("owner_files")
LETTERS = {text: n for n, text in enumerate(["</s>", "<unk>", "▁", *"abcdefgh ", "ab", "##b"])}
TEXT = "ab gab, ﬁ 12 cab\n"


@pytest.mark.parametrize("name", owner_files.TOKENIZERS)
def test_owners_tokenizer_is_refused_in_one_sentence(name):
    with pytest.raises(TextError) as refused:
        load_tokenizer(owner_files.TOKENIZERS[name], MAX_VOCABULARY)
    assert str(refused.value).isprintable() and len(str(refused.value)) < 300


@pytest.mark.parametrize("kind", ["WordLevel", "WordPiece", "Unigram"])
def test_tokenizer_without_its_unknown_token_is_refused_when_loaded(kind):
    words = {"</s>": 0, "a": 1}
    model = {"type": kind, "vocab": words, "unk_token": "[UNK]"}
    if kind == "WordPiece":
        model |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    if kind == "Unigram":
        model = {"type": kind, "unk_id": None, "vocab": [[word, -1.0] for word in words]}
    file = json.dumps({"version": "1.0", "model": model}).encode()
    with pytest.raises(TextError, match="it cannot be used: "):
        load_tokenizer(file, MAX_VOCABULARY, "it")


def test_owners_tokenizer_that_makes_its_library_panic_is_a_sentence():
    tokenizer = Tokenizer(BPE(vocab={"a": 0}, merges=[]))
    tokenizer.pre_tokenizer = pre.Split(Regex("(a+)+$"), "isolated")
    with pytest.raises(TextError, match=r"it cannot be used: Onig"), tokenizer_errors("it"):
        tokenizer.encode("a" * 100 + "b")
    with pytest.raises(KeyboardInterrupt), tokenizer_errors("it"):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("prefix", "merge"), [(None, ["a", "c"]), (None, "b a"), ("##", ["a", "b"]), ("##", "a ##c")]
)
def test_merge_into_no_token_is_refused_before_it_is_loaded(capfd, prefix, merge):
    model = {
        "type": "BPE",
        "vocab": LETTERS,
        "merges": [merge],
        "continuing_subword_prefix": prefix,
    }
    with pytest.raises(TextError, match=r"it has a merge of '[ab]' and '.*' into no token"):
        load_tokenizer(json.dumps({"model": model}).encode(), MAX_VOCABULARY, "it")
    assert capfd.readouterr().err == ""


def build(model, normalizer=None, pre_tokenizer=None, decoder=None) -> Tokenizer:
    tokenizer = Tokenizer(model)
    for name, part in (
        ("normalizer", normalizer),
        ("pre_tokenizer", pre_tokenizer),
        ("decoder", decoder),
    ):
        if part is not None:
            setattr(tokenizer, name, part)
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


# Put together as those of well-known models of this size are.
KNOWN = {
    "Llama 2": build(
        BPE(vocab=LETTERS, merges=[("a", "b")], byte_fallback=True, unk_token="<unk>"),
        norm.Sequence([norm.Prepend("▁"), norm.Replace(" ", "▁")]),
        decoder=dec.Sequence(
            [dec.Replace("▁", " "), dec.ByteFallback(), dec.Fuse(), dec.Strip(" ", 1, 0)]
        ),
    ),
    "GPT-NeoX": build(
        BPE(vocab=LETTERS, merges=[("a", "b")]), norm.NFC(), pre.ByteLevel(), dec.ByteLevel()
    ),
    "StarCoder": build(
        BPE(vocab=LETTERS, merges=[]),
        pre_tokenizer=pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel()]),
        decoder=dec.ByteLevel(),
    ),
    "T5 without its table": build(
        Unigram([(text, -1.0) for text in LETTERS], 1, False),
        norm.NFKC(),
        pre.Metaspace(),
        dec.Metaspace(),
    ),
    "BERT": build(
        WordPiece(LETTERS, unk_token="<unk>"),
        norm.BertNormalizer(),
        pre.BertPreTokenizer(),
        dec.WordPiece(),
    ),
} | {
    f"split by {pattern[:20]}": build(
        BPE(vocab=LETTERS, merges=[]), pre_tokenizer=pre.Split(Regex(pattern), "isolated")
    )
    for pattern in sorted(PATTERNS)
}


@pytest.mark.parametrize("name", KNOWN)
def test_tokenizer_of_a_known_kind_is_read_as_its_library_reads_it(name):
    loaded = load_tokenizer(KNOWN[name].to_str().encode(), MAX_VOCABULARY)
    ids = KNOWN[name].encode(TEXT, add_special_tokens=False).ids
    assert loaded.encode(TEXT, add_special_tokens=False).ids == ids
    assert loaded.decode(ids) == KNOWN[name].decode(ids)


def test_learned_tokenizer_is_read_byte_for_byte():
    assert read_tokenizer_file(bpe_file(), "it") == bpe_file()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=12), inner),
)


@given(
    place=st.sampled_from(["model", "normalizer", "decoder", "added_tokens", "pre_tokenizer"]),
    name=st.sampled_from(["type", "vocab", "merges", "pattern", "content", "normalizers", "id"]),
    value=json_values,
)
def test_owners_tokenizer_of_any_json_is_read_or_a_sentence(place, name, value):
    file = json.loads(bpe_file())
    if isinstance(file[place], dict):
        file[place][name] = value
    else:
        file[place] = value if name == "type" else {name: value}
    try:
        load_tokenizer(json.dumps(file).encode(), MAX_VOCABULARY)
    except TextError as error:
        assert str(error)
