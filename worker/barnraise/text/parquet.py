"""Read the text column of a Parquet file, a few rows at a time, whatever the file's size.

pyarrow reads the format. It is an extra (`pip install barnraise[parquet]`), because only a machine
that prepares such a text needs it.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from barnraise.errors import TextError

if TYPE_CHECKING:
    import pyarrow
    from pyarrow.parquet import FileMetaData

USUAL_COLUMNS = ("text", "content")  # usual names of a column of text, the likelier first
BATCH_ROWS = 256
BUFFER_BYTES = 1 << 20  # of a column read at a time, instead of a whole row group
MAX_ROW_GROUP_BYTES = 2 << 30  # that the text of one row group may take
MAX_METADATA_BYTES = 64 << 20  # of a file's own description


def read_texts(path: Path, name: str, column: str = "") -> Iterator[bytes]:
    """Read each row's text, without empty ones.

    Args:
        path: the Parquet file.
        name: what to call it in errors.
        column: the column with the text; by default the one with a usual name or the only one.

    Raises:
        TextError: the file cannot be read, or the column is not there.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise TextError(
            f"{name} is a Parquet file, which this machine cannot read yet: "
            "pip install 'barnraise[parquet]', then join again"
        ) from None
    try:
        with parquet.ParquetFile(
            path,
            buffer_size=BUFFER_BYTES,
            pre_buffer=False,
            thrift_string_size_limit=MAX_METADATA_BYTES,
            thrift_container_size_limit=MAX_METADATA_BYTES,
        ) as file:
            chosen = _choose_column(file.schema_arrow, name, column)
            _check_size(file.metadata, chosen, name)
            for batch in file.iter_batches(BATCH_ROWS, columns=[chosen], use_threads=False):
                values = batch.column(0)
                if pyarrow.types.is_dictionary(values.type):
                    values = values.dictionary_decode()
                # As binary: bytes that are not UTF-8 are replaced later, when they are encoded.
                for text in values.cast(pyarrow.large_binary()).to_pylist():
                    if text:
                        yield text
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        first = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise TextError(f"{name} cannot be read as a Parquet file: {first}") from None


def _choose_column(schema: "pyarrow.Schema", name: str, column: str) -> str:
    text_columns = [field.name for field in schema if _is_text(field.type)]
    if column:
        if column in text_columns:
            return column
        raise TextError(
            f"{name} has no column of text called '{column}'; it has {_list_names(text_columns)}"
        )
    usual = [usual_name for usual_name in USUAL_COLUMNS if usual_name in text_columns]
    if usual or len(text_columns) == 1:
        return (usual or text_columns)[0]
    advice = "there is nothing to train on in it"
    if text_columns:
        advice = "name one as owner/name#column"
    raise TextError(f"{name} has the columns of text {_list_names(text_columns)}: {advice}")


def _is_text(column_type: "pyarrow.DataType") -> bool:
    from pyarrow import types

    if types.is_dictionary(column_type):
        column_type = column_type.value_type
    return (
        types.is_string(column_type)
        or types.is_large_string(column_type)
        or types.is_string_view(column_type)
    )


def _list_names(names: Sequence[str]) -> str:
    printable = ("".join(c for c in name if c.isprintable())[:40] for name in names[:20])
    return ", ".join(printable) or "none"


def _check_size(metadata: "FileMetaData", column: str, name: str) -> None:
    """Refuse a file that claims huge row groups; reading holds its pages to what it claims."""
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for index in range(row_group.num_columns):
            chunk = row_group.column(index)
            size = chunk.total_uncompressed_size
            if chunk.path_in_schema == column and not 0 <= size <= MAX_ROW_GROUP_BYTES:
                raise TextError(f"{name} says that its row group {group} holds {size:,} bytes")
