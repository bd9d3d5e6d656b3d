"""The text column of a Parquet file, as most datasets are stored: read a few rows at a time, whatever the file's size.

pyarrow reads it: an extra (`pip install barnraise[parquet]`), as only a machine that prepares such a text needs it.
"""

from collections.abc import Iterator
from pathlib import Path

from barnraise.errors import TextError

USUAL = ("text", "content")  # what a column of text is called, the likelier first
ROWS = 256  # at a time
BUFFER = 1 << 20  # bytes of a column read at a time, instead of all of a row group's
GROUP = 2 << 30  # bytes that the text of one row group may take
THRIFT = 64 << 20  # bytes of a file's own description


def texts(path: Path, name: str, column: str = "") -> Iterator[bytes]:
    """Each row's text, empty ones left out; of the `column` that is named, else of the one that is called as usual or
    is the only text. Raises TextError, with the file's `name`."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise TextError(
            f"{name} is a Parquet file, and this machine lacks what reads them: pip install 'barnraise[parquet]', "
            "then join again"
        ) from None
    try:
        with parquet.ParquetFile(
            path, buffer_size=BUFFER, pre_buffer=False, thrift_string_size_limit=THRIFT,
            thrift_container_size_limit=THRIFT,
        ) as file:  # fmt: skip
            chosen = _column(file.schema_arrow, name, column)
            _check_size(file.metadata, chosen, name)
            for batch in file.iter_batches(ROWS, columns=[chosen], use_threads=False):
                values = batch.column(0)
                if pyarrow.types.is_dictionary(values.type):
                    values = values.dictionary_decode()
                for text in values.cast(
                    pyarrow.large_binary()
                ).to_pylist():  # what is no UTF-8 is put right later
                    if text:
                        yield text
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        first = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise TextError(f"{name} cannot be read as a Parquet file: {first}") from None


def _column(schema, name: str, column: str) -> str:
    import pyarrow

    def is_text(kind) -> bool:
        if pyarrow.types.is_dictionary(kind):
            kind = kind.value_type
        return (
            pyarrow.types.is_string(kind)
            or pyarrow.types.is_large_string(kind)
            or pyarrow.types.is_string_view(kind)
        )

    found = [field.name for field in schema if is_text(field.type)]
    if column:
        if column in found:
            return column
        raise TextError(f"{name} has no column of text called '{column}'; it has {_list(found)}")
    usual = [each for each in USUAL if each in found]
    if usual or len(found) == 1:
        return (usual or found)[0]
    which = "name one as owner/name#column" if found else "there is nothing to train on in it"
    raise TextError(f"{name} has the columns of text {_list(found)}: {which}")


def _list(names: list[str]) -> str:
    shown = ", ".join("".join(c for c in each if c.isprintable())[:40] for each in names[:20])
    return shown or "none"


def _check_size(metadata, column: str, name: str) -> None:
    """By what the file says of itself: its pages are held to that when they are read."""
    for group in range(metadata.num_row_groups):
        row = metadata.row_group(group)
        for index in range(row.num_columns):
            chunk = row.column(index)
            if chunk.path_in_schema == column and not 0 <= chunk.total_uncompressed_size <= GROUP:
                raise TextError(
                    f"{name} says that its row group {group} holds {chunk.total_uncompressed_size:,} bytes"
                )
