"""Learn, load and apply a run's tokenizer: plain bytes or a byte-level BPE.

Deterministic: the same documents give the same tokenizer file and the same tokens. Text that spells
a special token stays text: only the end of a document becomes the end token.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from barnraise.errors import TextError
from barnraise.text.tokenizer_file import MAX_TOKEN_CHARACTERS, read_tokenizer_file

END_TOKEN = "<|endoftext|>"  # token 0 of a BPE that is learned here, after each document
END_BYTE = 0xFF  # ends a document of plain bytes: no text in UTF-8 contains this byte
# How tokenizers of others call the end of a document, the likelier first.
END_NAMES = (
    *(END_TOKEN, "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "<|im_end|>", "[EOS]", "<EOS>"),
    *("<｜end▁of▁sentence｜>", "<|endofprompt|>", "<|eot_id|>", "<|EOT|>", "<end_of_turn>"),
    *("<|end|>", "<|return|>", "[SEP]"),
)
TOKENIZER_SAMPLE_BYTES = 4 << 20  # a BPE learns from this much; more takes longer, changes little
SAMPLE_PART_BYTES = 64 << 10  # a longer document is sampled in parts of this size
VOCABULARY_MULTIPLE = 64  # to which a vocabulary is rounded up; matrix products like such sizes
ENCODE_BATCH_BYTES = 1 << 20  # encoding everything at once would take gigabytes
TOKEN_DTYPE = np.dtype("<u4")  # of tokens in memory
# In a chat, a special token of the template is spelled with its number between these characters,
# which no text contains; so the same words inside of a message stay text.
MARK_BEGIN = "\ufdd0"
MARK_END = "\ufdd1"
MARK = re.compile(f"{MARK_BEGIN}(\\d+){MARK_END}")


def train_tokenizer(documents: Sequence[bytes], vocabulary: int) -> Tokenizer:
    """Learn a byte-level BPE, GPT-2's kind, from a sample of the documents.

    Args:
        documents: the training text.
        vocabulary: the number of tokens, END_TOKEN among them. A text with few different words
            gives fewer.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_TOKEN],
        initial_alphabet=sorted(ByteLevel.alphabet()),
        max_token_length=MAX_TOKEN_CHARACTERS,
        show_progress=False,
    )
    sample = (part.decode("utf-8", errors="replace") for part in sample_documents(documents))
    tokenizer.train_from_iterator(sample, trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def sample_documents(documents: Sequence[bytes]) -> Iterator[bytes]:
    """Yield parts of the documents, in the order of their hashes, up to TOKENIZER_SAMPLE_BYTES.

    Of each document one part comes first; further parts follow while there is room.
    """
    order = sorted(range(len(documents)), key=lambda i: blake3(documents[i]).digest())
    left = TOKENIZER_SAMPLE_BYTES
    begin = 0
    while order and left > 0:
        for i in order:
            part = documents[i][begin : begin + min(SAMPLE_PART_BYTES, left)]
            left -= len(part)
            yield part
            if left <= 0:
                return
        begin += SAMPLE_PART_BYTES
        order = [i for i in order if len(documents[i]) > begin]


def round_vocabulary(tokens: int) -> int:
    """Return the size of a model's vocabulary for so many tokens: the next multiple of 64."""
    return -(-tokens // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def load_tokenizer(
    file: bytes, vocabulary: int, shown: str = "the tokenizer of the run this one starts from"
) -> Tokenizer:
    """Load a tokenizer from the content of its tokenizer.json, once that is checked.

    Raises:
        TextError: the file is not a tokenizer of at most `vocabulary` tokens with an end token, or
            holds what no run may have.
    """
    checked = read_tokenizer_file(file, shown)
    with tokenizer_errors(shown):
        tokenizer = Tokenizer.from_buffer(checked)
        tokenizer.encode("\uffff")  # which is unknown to most, and some have no token for that
    size = count_tokens(tokenizer)
    if size > vocabulary:
        raise TextError(
            f"{shown} has {size:,} tokens, more than the vocabulary of {vocabulary:,}: "
            f"set the run's vocabulary to {round_vocabulary(size):,}"
        )
    find_end_token(tokenizer, shown)
    tokenizer.encode_special_tokens = True  # text that spells one stays text
    return tokenizer


@contextlib.contextmanager
def tokenizer_errors(shown: str) -> Iterator[None]:
    """Raise TextError instead of what the library raises. Its panics are no `Exception`."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TextError(f"{shown} cannot be used: {str(error)[:200]}") from None


def count_tokens(tokenizer: Tokenizer) -> int:
    """Return one more than the highest number of a token: numbers may be missing in between."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def find_end_token(tokenizer: Tokenizer, shown: str = "the tokenizer") -> int:
    """Return the token that ends a document.

    Raises:
        TextError: the tokenizer has none of the usual names.
    """
    for name in END_NAMES:
        token = tokenizer.token_to_id(name)
        if token is not None:
            return token
    raise TextError(f"{shown} has no token that ends a text, such as {', '.join(END_NAMES[:4])}")


def encode_pieces(
    pieces: Iterable[tuple[bytes, bool]], tokenizer: Tokenizer | None, has_marks: bool = False
) -> Iterator[npt.NDArray[np.uint32]]:
    """Encode pieces of text one by one.

    Args:
        pieces: UTF-8, and whether the end token follows.
        tokenizer: a BPE, or None for plain bytes.
        has_marks: whether special tokens are spelled between MARK_BEGIN and MARK_END.

    Yields:
        The tokens of each piece.
    """
    if tokenizer is None:
        for content, is_last in pieces:
            ending = bytes([END_BYTE]) if is_last else b""
            yield np.frombuffer(content + ending, np.uint8).astype(TOKEN_DTYPE)
        return
    end = [find_end_token(tokenizer)]
    batch: list[str] = []
    ends: list[list[int]] = []
    batch_bytes = 0
    for content, is_last in pieces:
        text = content.decode("utf-8", errors="replace")
        if has_marks:
            ids = [*_encode_marked(text, tokenizer), *(end if is_last else [])]
            yield np.array(ids, TOKEN_DTYPE)
            continue
        batch.append(text)
        ends.append(end if is_last else [])
        batch_bytes += len(content)
        if batch_bytes >= ENCODE_BATCH_BYTES:
            yield from _encode_batch(batch, ends, tokenizer)
            batch = []
            ends = []
            batch_bytes = 0
    yield from _encode_batch(batch, ends, tokenizer)


def _encode_batch(
    batch: list[str], ends: list[list[int]], tokenizer: Tokenizer
) -> Iterator[npt.NDArray[np.uint32]]:
    encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
    for encoding, end in zip(encodings, ends, strict=True):
        yield np.array(encoding.ids + end, TOKEN_DTYPE)


def _encode_marked(text: str, tokenizer: Tokenizer) -> list[int]:
    """Encode a chat: the numbers between marks are tokens, everything else is text."""
    ids: list[int] = []
    for position, part in enumerate(MARK.split(text)):
        if position % 2:
            ids.append(int(part))
        elif part:
            ids += tokenizer.encode(part, add_special_tokens=False).ids
    return ids
