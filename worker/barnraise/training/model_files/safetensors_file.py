"""Write safetensors files one fragment at a time.

The format: eight bytes of the header's length, the header as JSON, then the values. The safetensors
library cannot write it without having all tensors in memory.
"""

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from barnraise.models.weights import views
from barnraise.spec import Fragment
from barnraise.training.model_files.transformers_names import TransformersTensor

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}


def write_fragments(
    path: Path,
    fragments: Sequence[Fragment],
    load: Callable[[Fragment], Tensor],
    tensors: Callable[[Fragment], list[TransformersTensor]],
    dtype: torch.dtype,
) -> None:
    """Write fragments under their names in transformers.

    Args:
        path: the file.
        fragments: what to write.
        load: loads one fragment, when it is its turn.
        tensors: lists a fragment's tensors under their names.
        dtype: of the written values, a key of `DTYPES`.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for fragment in fragments:
        for tensor in tensors(fragment):
            end = offset + dtype.itemsize * math.prod(tensor.shape)
            header[tensor.name] = {
                "dtype": DTYPES[dtype],
                "shape": tensor.shape,
                "data_offsets": [offset, end],
            }
            offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for fragment in fragments:
            weights = views(fragment, load(fragment))
            for tensor in tensors(fragment):
                values = tensor.view(weights)
                file.write(values.to(dtype).contiguous().view(torch.uint8).numpy().data)
            del weights  # free it before the next fragment is loaded
        file.flush()
        os.fsync(file.fileno())
