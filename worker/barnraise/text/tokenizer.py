"""Learn, load and apply a run's tokenizer: plain bytes or a byte-level BPE.

Deterministic: the same documents give the same tokenizer file and the same tokens.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from barnraise.errors import TextError

END_TOKEN = "<|endoftext|>"  # token 0 of a BPE, after each document; with plain bytes it is byte 0
TOKENIZER_SAMPLE_BYTES = 4 << 20  # a BPE learns from this much; more takes longer, changes little
ENCODE_BATCH_BYTES = 1 << 20  # encoding everything at once would take gigabytes
TOKEN_DTYPE = np.dtype("<u2")


def train_tokenizer(documents: Sequence[bytes], vocabulary: int) -> Tokenizer:
    """Learn a byte-level BPE, GPT-2's kind, from a sample of whole documents.

    Args:
        documents: the training text.
        vocabulary: the number of tokens, END_TOKEN among them.
    """
    sample: list[str] = []
    sample_bytes = 0
    for content in sorted(documents, key=lambda content: blake3(content).digest()):
        if sample_bytes + len(content) <= TOKENIZER_SAMPLE_BYTES:
            sample_bytes += len(content)
            sample.append(_decode_utf8(content))
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_TOKEN],
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def load_tokenizer(file: bytes, vocabulary: int) -> Tokenizer:
    """Load another run's tokenizer from the content of its file.

    Raises:
        TextError: the file is not a tokenizer of `vocabulary` tokens with END_TOKEN.
    """
    try:
        tokenizer = Tokenizer.from_buffer(file)
    except Exception as error:  # tokenizers raises nothing narrower
        raise TextError(
            f"the tokenizer of the run this one starts from cannot be read: {error}"
        ) from None
    if tokenizer.get_vocab_size() > vocabulary or tokenizer.token_to_id(END_TOKEN) is None:
        raise TextError(
            f"the tokenizer of the run this one starts from does not have {vocabulary:,} tokens"
        )
    return tokenizer


def encode_documents(
    documents: Sequence[bytes], tokenizer: Tokenizer | None
) -> npt.NDArray[np.uint16]:
    """Encode documents as one stream of uint16 tokens, with the end token after each.

    Args:
        documents: the text.
        tokenizer: a BPE, or None for plain bytes.
    """
    if tokenizer is None:
        joined = b"".join(content + b"\0" for content in documents)
        return np.frombuffer(joined, np.uint8).astype(TOKEN_DTYPE)
    end = tokenizer.token_to_id(END_TOKEN)
    parts: list[npt.NDArray[np.uint16]] = []
    batch: list[str] = []
    batch_bytes = 0
    for position, content in enumerate(documents):
        batch.append(_decode_utf8(content))
        batch_bytes += len(content)
        if batch_bytes >= ENCODE_BATCH_BYTES or position == len(documents) - 1:
            encodings = tokenizer.encode_batch_fast(batch)
            parts += [np.array([*encoding.ids, end], TOKEN_DTYPE) for encoding in encodings]
            batch = []
            batch_bytes = 0
    return np.concatenate(parts)


def _decode_utf8(content: bytes) -> str:
    return content.decode("utf-8", errors="replace")
