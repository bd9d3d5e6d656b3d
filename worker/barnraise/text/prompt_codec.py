"""Turn a prompt into a run's tokens, and generated tokens back into text for people."""

import unicodedata

from barnraise.protocol.types import HIDDEN_CATEGORIES
from barnraise.spec import MAX_VOCABULARY
from barnraise.text.tokenizer import (
    END_BYTE,
    count_tokens,
    find_end_token,
    load_tokenizer,
    tokenizer_errors,
)

REPLACEMENT = "\ufffd"
SHOWN = "the run's tokenizer"


class PromptCodec:
    """A run's tokens as text: plain bytes, or a BPE.

    Attributes:
        count: tokens that stand for text or end a document.
        end: the token after each document.
    """

    def __init__(self, tokenizer_file: bytes | None, vocabulary: int = MAX_VOCABULARY) -> None:
        """Load a tokenizer of at most so many tokens from its file; None stands for plain bytes.

        Raises:
            TextError: the file is no tokenizer that a run may have.
        """
        self._tokenizer = None
        self.count, self.end = 256, END_BYTE
        if tokenizer_file is not None:
            self._tokenizer = load_tokenizer(tokenizer_file, vocabulary, SHOWN)
            self.count = count_tokens(self._tokenizer)
            self.end = find_end_token(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text. Raises TextError if the library fails."""
        if self._tokenizer is None:
            return list(text.encode("utf-8", errors="replace"))
        with tokenizer_errors(SHOWN):
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens; bytes that are no UTF-8 become U+FFFD.

        A token has at most `MAX_TOKEN_CHARACTERS`, so that few tokens never become a long text.

        Raises:
            TextError: the library fails.
        """
        if self._tokenizer is None:
            return bytes(tokens).decode("utf-8", errors="replace")
        with tokenizer_errors(SHOWN):
            return self._tokenizer.decode(tokens, skip_special_tokens=False)


class TextStream:
    """Text that grows token by token; a token may end within a character.

    Attributes:
        tokens: all tokens so far.
    """

    def __init__(self, codec: PromptCodec, tokens: list[int]) -> None:
        """Begin with the tokens of a prompt."""
        self._codec = codec
        self.tokens = list(tokens)
        self._first = 0  # the token from which on text is decoded
        self._shown = 0  # characters of it that were returned

    def add(self, token: int) -> None:
        """Append a token."""
        self.tokens.append(token)

    def next_text(self, is_complete: bool = False) -> str:
        """Return the text that the last tokens complete; all of it if nothing follows."""
        text = self._codec.decode(self.tokens[self._first :])
        end = len(text)
        if not is_complete and text.endswith((REPLACEMENT, "\r")):
            end = len(text.rstrip(REPLACEMENT + "\r"))
        part = text[self._shown : end]
        self._shown = max(self._shown, end)
        if self._shown == len(text) and part:
            # Decode only what follows, so that a long text takes linear time.
            self._first, self._shown = len(self.tokens), 0
        return make_printable(part)


def make_printable(text: str) -> str:
    """Replace what a terminal or page would obey instead of showing: control characters and marks.

    Line ends and tabs stay.
    """
    unified = text.replace("\r\n", "\n").replace("\r", "\n")
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) not in HIDDEN_CATEGORIES else REPLACEMENT
        for c in unified
    )
