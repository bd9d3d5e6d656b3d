"""Write a run's tokenizer as the transformers library reads it, for bytes as well as for BPE."""

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from barnraise.spec import MAX_VOCABULARY
from barnraise.text.tokenizer import END_BYTE, END_TOKEN, find_end_token, load_tokenizer
from barnraise.text.tokenizer_file import read_tokenizer_file

TOKENIZER_FILE, TOKENIZER_CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
SHOWN = "the run's tokenizer"
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


@dataclass(frozen=True)
class ExportedTokenizer:
    """A run's tokenizer as other programs need it."""

    content: bytes  # of tokenizer.json
    # Each token's text by its number, in the characters that stand for bytes.
    tokens: tuple[str, ...]
    merges: tuple[tuple[str, str], ...]  # of a BPE, in their order; none for bytes
    end_token: str  # the text of the token after each document
    end_id: int  # its number

    @classmethod
    def of_run(cls, tokenizer_file: bytes | None) -> "ExportedTokenizer":
        """Return a run's tokenizer; `tokenizer_file` is None for plain bytes.

        Raises:
            TextError: the file is no tokenizer that a run may have.
        """
        content = byte_tokenizer().to_str(pretty=True).encode()
        if tokenizer_file is not None:
            # The run was trained on the tokens of the text alone, without what else the file adds.
            content = read_tokenizer_file(tokenizer_file, SHOWN)
        tokenizer = load_tokenizer(content, MAX_VOCABULARY, SHOWN)
        end_id = find_end_token(tokenizer)
        end_token = tokenizer.id_to_token(end_id)
        assert end_token is not None, "it was found by its text"
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        tokens = [""] * (max(vocabulary.values()) + 1)
        for token, number in vocabulary.items():
            tokens[number] = token
        merges = json.loads(content)["model"].get("merges", [])
        pairs = tuple(
            (str(merge[0]), str(merge[1])) if isinstance(merge, list) else _split_merge(merge)
            for merge in merges
        )
        return cls(content, tuple(tokens), pairs, end_token, end_id)

    def config(self, context: int) -> dict[str, Any]:
        """Return the content of tokenizer_config.json for a model with this context."""
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context,
            "bos_token": self.end_token,
            "eos_token": self.end_token,
            "pad_token": self.end_token,
            "padding_side": "left",  # generation continues at the right end
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
        }


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer of 256 tokens, whose numbers are the bytes.

    Byte 0xFF, which no text in UTF-8 contains, ends a document: its token is END_TOKEN.
    """
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    del vocabulary[byte_characters()[END_BYTE]]
    vocabulary[END_TOKEN] = END_BYTE
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([END_TOKEN])
    return tokenizer


def byte_characters() -> list[str]:
    """Return the character that stands for each byte in a byte-level BPE (Radford et al. 2019).

    Printable bytes stand for themselves. The others follow from U+0100 on, in order.
    """
    others = (byte for byte in range(256) if byte not in _PRINTABLE)
    shifted = {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [shifted.get(byte, chr(byte)) for byte in range(256)]


def _split_merge(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right
