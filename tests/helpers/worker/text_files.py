"""Texts in files of every format, as bytes and as what an inspection finds in them."""

import io
import json
import zipfile
from pathlib import Path

import pyarrow
from pyarrow import parquet

from barnraise.spec import TextSpec
from barnraise.text.inspection import Inspection, inspect_source
from barnraise.text.places import parse_place
from barnraise.text.reading import open_source
from barnraise.text.shards import TextPlan

LINES = "".join(f"Sentence {i} of the text, with some words.\n" for i in range(60))
ROWS = [{"text": f"Row {i} has some words in it.", "id": i} for i in range(30)]
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS)
TEXTS = [row["text"] for row in ROWS]
CSV = "id,text\n" + "".join(f"{i},{text}\n" for i, text in enumerate(TEXTS))
BYTES = TextPlan(TextSpec(tokenizer="bytes"))  # learning a BPE would only take longer
PEM = "-----BEGIN PRIVATE KEY-----\n"


def inspect(*places: Path | str, plan: TextPlan = BYTES) -> Inspection:
    """Inspect files and folders as one source."""
    with open_source([parse_place(str(place)) for place in places]) as source:
        return inspect_source(source, plan)


def table(**columns: object) -> bytes:
    """Return a Parquet file with these columns."""
    file = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), file, row_group_size=20)
    return file.getvalue()


def archive(**files: bytes) -> bytes:
    """Return a zip archive of these files."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as content:
        for name, data in files.items():
            content.writestr(name, data)
    return file.getvalue()
