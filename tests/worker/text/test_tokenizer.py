"""Tests of BPE: encoding is reversible, and a token separates documents."""

import numpy as np

from barnraise.text.tokenizer import END_TOKEN, encode_pieces, train_tokenizer


def test_bpe_round_trips_and_separates_documents():
    texts = ("def f():\n    return '…✓'\n", "import os\n", "x = 1\n" * 50)
    files = [text.encode() for text in texts]
    tokenizer = train_tokenizer(files, 300)
    stream = np.concatenate(list(encode_pieces([(file, True) for file in files], tokenizer)))
    end = tokenizer.token_to_id(END_TOKEN)
    assert end == 0 and (stream == end).sum() == 3 and stream[-1] == end and stream.max() < 300
    decoded = tokenizer.decode(stream.tolist(), skip_special_tokens=False)
    assert decoded == END_TOKEN.join([*texts, ""])
