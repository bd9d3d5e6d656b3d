"""Check the tokenizer file of a run before its library reads it. Pure.

A run's owner chooses the file, and every volunteer loads it. Some of what the library reads can
multiply a text without end, search it for hours, or ask for memory by a number. So only the kinds
of parts are read that text of a run needs, each with a bound.
"""

import json
from collections.abc import Iterator
from typing import Any

from barnraise.errors import TextError
from barnraise.spec import MAX_TOKENIZER_BYTES, MAX_VOCABULARY

MAX_TOKEN_CHARACTERS = 1024  # of one token
MAX_VOCABULARY_CHARACTERS = 1 << 22  # of all tokens together
MAX_BRACKETS = 4 * MAX_VOCABULARY  # every list takes memory, and each merge is one
MAX_PARTS = 16  # of a sequence
MAX_SETTING = 1024  # a number in the settings of a part
MAX_SETTING_CHARACTERS = 32  # a text there

# The model's kind → its settings, as the library orders them. Older files name no kind for a BPE.
MODELS = {
    "BPE": (
        *("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk"),
        *("byte_fallback", "ignore_merges", "vocab", "merges"),
    ),
    "Unigram": ("unk_id", "vocab", "byte_fallback"),
    "WordPiece": ("unk_token", "continuing_subword_prefix", "max_input_chars_per_word", "vocab"),
    "WordLevel": ("vocab", "unk_token"),
}
# Of each part the kinds that may occur. None of them lets a text grow beyond a small factor.
KINDS = {
    "normalizer": {
        *("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "BertNormalizer"),
        *("Prepend", "Replace"),
    },
    "pre_tokenizer": {
        *("ByteLevel", "Digits", "Punctuation", "Metaspace", "Whitespace", "WhitespaceSplit"),
        *("BertPreTokenizer", "Split"),
    },
    "decoder": {
        *("ByteLevel", "ByteFallback", "Fuse", "Metaspace", "WordPiece", "BPEDecoder", "Strip"),
        "Replace",
    },
}
SEQUENCES = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Llama 3 has the first three digits of a number together.
LLAMA3_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_REST}"
QWEN2_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_REST}"
# The expressions by which tokenizers of this size split a text; others might search for hours.
PATTERNS = {
    *(r"\p{N}", r"\p{N}{1,3}", "[0-9][0-9][0-9]", "[\r\n]", r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+"),
    "[一-龥ࠀ-一가-퟿]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    LLAMA3_WORDS,
    QWEN2_WORDS,
}


def read_tokenizer_file(content: bytes, shown: str) -> bytes:
    """Return a tokenizer.json of what decides the tokens of a text, all of it checked.

    The library is to load this, and not the file, which it might read differently. What adds tokens
    to a text, and what cuts it or fills it up for batches, is left out.

    Raises:
        TextError: the file is too large, no tokenizer, or holds what no run may have.
    """
    if len(content) > MAX_TOKENIZER_BYTES:
        raise TextError(
            f"{shown} has more than {MAX_TOKENIZER_BYTES:,} bytes; a run's vocabulary has at most "
            f"{MAX_VOCABULARY:,} tokens"
        )
    try:
        if content.count(b"[") + content.count(b"{") > MAX_BRACKETS:
            raise _RefusedError("lists without end")
        file = json.loads(content)
        model, added = _read_model(file["model"]), _read_added(file.get("added_tokens") or [])
        _check_vocabulary(model["vocab"], added)
        checked = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": _read_part("normalizer", file.get("normalizer")),
            "pre_tokenizer": _read_part("pre_tokenizer", file.get("pre_tokenizer")),
            "post_processor": None,
            "decoder": _read_part("decoder", file.get("decoder")),
            "model": model,
        }
        return json.dumps(checked, ensure_ascii=False, separators=(",", ":")).encode()
    except _RefusedError as refused:
        raise TextError(f"{shown} has {refused}, which no run may have") from None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise TextError(f"{shown} cannot be read: it is no tokenizer.json") from None


class _RefusedError(Exception):
    """Names what no run may have."""


def _read_part(name: str, part: Any) -> dict[str, Any] | None:
    """Return a normalizer, a pre-tokenizer or a decoder."""
    if part is None:
        return None
    if part["type"] != "Sequence":
        return _read_kind(name, part)
    parts = part[SEQUENCES[name]]
    if len(parts) > MAX_PARTS:
        raise _RefusedError(f"{len(parts):,} {SEQUENCES[name]} in a row")
    return {"type": "Sequence", SEQUENCES[name]: [_read_kind(name, each) for each in parts]}


def _read_kind(name: str, part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] not in KINDS[name]:
        raise _RefusedError(f"a {name} of the kind {str(part['type'])[:40]!r}")
    for setting, value in part.items():
        if setting == "pattern":
            _check_pattern(part)
        elif not _is_small(value):
            raise _RefusedError(f"a {name} with {setting[:40]!r} of such a size or kind")
    return part


def _check_pattern(part: dict[str, Any]) -> None:
    """Refuse a search without a bound, and a replacement that is longer than what it replaces."""
    ((kind, pattern),) = part["pattern"].items()
    is_known = kind == "Regex" and pattern in PATTERNS and part["type"] == "Split"
    if not is_known and not (kind == "String" and pattern and _is_small(pattern)):
        raise _RefusedError(f"the pattern {str(pattern)[:60]!r}")
    if len(part.get("content", "")) > len(pattern):
        raise _RefusedError(f"a {part['type']} that lengthens the text")


def _is_small(value: Any) -> bool:
    """Return whether a setting is a switch, a small number or a few characters."""
    if isinstance(value, str):
        return len(value) <= MAX_SETTING_CHARACTERS
    return value is None or (isinstance(value, int) and 0 <= value <= MAX_SETTING)


def _read_model(model: dict[str, Any]) -> dict[str, Any]:
    """Return a model without settings that have no effect here, or draw tokens at random."""
    model = {**model, "dropout": None}
    kind = model.get("type") or ("BPE" if "merges" in model else "")
    if kind not in MODELS:
        raise _RefusedError(f"a model of the kind {str(kind)[:40]!r}")
    for name in MODELS[kind]:
        is_text = name in ("vocab", "merges", "unk_token", "unk_id")
        if not is_text and not _is_small(model.get(name)):
            raise _RefusedError(f"a model with {name!r} of such a size or kind")
    if kind == "BPE":
        _check_merges(model)
    read = {name: model[name] for name in MODELS[kind] if name in model}
    return {"type": kind, **read}


def _check_merges(model: dict[str, Any]) -> None:
    """Refuse a merge whose result is no token: the library panics, and prints its own stack."""
    prefix = model.get("continuing_subword_prefix") or ""
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        if not right.startswith(prefix) or left + right[len(prefix) :] not in model["vocab"]:
            raise _RefusedError(f"a merge of {left[:40]!r} and {right[:40]!r} into no token")


def _read_added(tokens: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tokens that were added to a vocabulary."""
    switches = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return [
        {"id": token["id"], "content": token["content"]}
        | {name: bool(token.get(name, False)) for name in switches}
        for token in tokens
    ]


def _check_vocabulary(vocabulary: Any, added: list[dict[str, Any]]) -> None:
    """Refuse a token beyond the largest vocabulary, and texts of tokens that fill memory."""
    characters = 0
    for text, number in _list_tokens(vocabulary, added):
        if not isinstance(number, int) or not 0 <= number < MAX_VOCABULARY:
            raise _RefusedError(f"the token number {str(number)[:40]!r}")
        characters += len(text)
        if len(text) > MAX_TOKEN_CHARACTERS or characters > MAX_VOCABULARY_CHARACTERS:
            raise _RefusedError("tokens of so many characters")


def _list_tokens(vocabulary: Any, added: list[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the text and number of every token."""
    yield from ((token["content"], token["id"]) for token in added)
    if isinstance(vocabulary, dict):
        yield from vocabulary.items()
    else:  # of a unigram model: pairs of a text and its logarithmic probability
        yield from ((text, number) for number, (text, _) in enumerate(vocabulary))
