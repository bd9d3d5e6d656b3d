"""Cut text into pieces at line, sentence or size boundaries. Pure."""

import re
from collections.abc import Iterable, Iterator

PIECE_CHARACTERS = 64 << 10  # of a document that is cut out of a longer text
# The ends of sentences, in the scripts that have a mark for them.
_SENTENCE_END = re.compile(r"""[.!?…]["'”’)\]]*\s|[。！？؟।]["'”’）」』]*""")


def cut_position(text: str, limit: int) -> int:
    """Return where to cut a text that is longer than `limit` characters.

    The cut is after the last paragraph or line that ends in the second half of the limit, else
    after a sentence, else after a space, else at the limit.
    """
    half = limit // 2
    for mark in ("\n\n", "\n"):
        found = text.rfind(mark, half, limit)
        if found >= 0:
            return found + len(mark)
    ends = [match.end() for match in _SENTENCE_END.finditer(text, half, limit)]
    if ends:
        return ends[-1]
    space = text.rfind(" ", half, limit)
    return space + 1 if space >= 0 else limit


def cut_stream(texts: Iterable[str], limit: int = PIECE_CHARACTERS) -> Iterator[str]:
    """Cut a text that arrives in parts into pieces of at most `limit` characters.

    The pieces do not depend on how the text is divided into parts.
    """
    rest = ""
    for text in texts:
        rest += text
        begin = 0
        while len(rest) - begin > limit:
            end = begin + cut_position(rest[begin : begin + limit], limit)
            yield rest[begin:end]
            begin = end
        rest = rest[begin:]
    if rest:
        yield rest
