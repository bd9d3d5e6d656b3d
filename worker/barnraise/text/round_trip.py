"""Compare a text with what its tokens decode to: a model cannot learn what is lost in between."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Tokenizer

from barnraise.formats import format_share
from barnraise.text.tokenizer import MARK

NAMED_CHARACTERS = 5  # of those that are lost


class RoundTrip(NamedTuple):
    """How many tokens a text has, and what share of its characters they lose, in words too."""

    tokens: int
    lost_share: float
    sentence: str


def measure_round_trip(documents: Sequence[bytes], tokenizer: Tokenizer) -> RoundTrip:
    """Encode and decode documents, and count the characters that each of them loses or gains."""
    texts = [MARK.sub("", document.decode("utf-8", errors="ignore")) for document in documents]
    tokens = [
        encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    ]
    unknown = _find_unknown_token(tokenizer)
    known = [[token for token in ids if token != unknown] for ids in tokens]
    decoded = tokenizer.decode_batch(known, skip_special_tokens=False)
    lost: Counter[str] = Counter()
    gained: Counter[str] = Counter()
    changed = 0
    for text, back in zip(texts, decoded, strict=True):
        if text in (back, back.removeprefix(" ")):  # many tokenizers set a space before a text
            continue
        before, after = Counter(text), Counter(back)
        lost += before - after
        gained += after - before
        changed += min(len(text), max((before - after).total(), (after - before).total()))
    reasons: list[str] = []
    whole = "".join(texts)
    normalised = tokenizer.normalizer.normalize_str(whole) if tokenizer.normalizer else whole
    if lost & (Counter(whole) - Counter(normalised)):
        reasons.append("its normaliser changes them")
    added = [c for c in gained - (Counter(normalised) - Counter(whole)) if not c.isspace()]
    if added:
        reasons.append(f"its decoder adds {', '.join(map(repr, added[:NAMED_CHARACTERS]))}")
    count = sum(map(len, tokens))
    if unknown_tokens := count - sum(map(len, known)):
        reasons.append(
            f"{format_share(unknown_tokens / count)} of the text's tokens are unknown to it"
        )
    sentence = f"{changed:,} of {len(whole):,} characters of a sample do not come back"
    if changed:
        named = ", ".join(repr(character) for character, _ in lost.most_common(NAMED_CHARACTERS))
        why = " and ".join(reasons) or "it has no tokens for them, or adds or drops white space"
        sentence += f" from the tokenizer ({named or 'white space'}): {why}"
    return RoundTrip(count, changed / max(1, len(whole)), sentence)


def _find_unknown_token(tokenizer: Tokenizer) -> int | None:
    """Return the token that stands for what a tokenizer does not know; None if it knows all."""
    model = json.loads(tokenizer.to_str())["model"]
    if isinstance(model.get("unk_id"), int):  # of a unigram model
        return model["unk_id"]
    return tokenizer.token_to_id(model.get("unk_token") or "")
