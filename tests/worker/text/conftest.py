"""A part of the text of Python's standard library, prepared once, and inspected files."""

import pytest
from helpers.updates.blob_folder import BlobFolder
from helpers.worker.text_files import inspect
from sharded_documents import shard_documents

from barnraise.protocol.coordinator_messages import TextManifest
from barnraise.spec import TextSpec
from barnraise.text.inspection import Inspection
from barnraise.text.stdlib_text import read_stdlib

RUN = "01890000-0000-7000-8000-000000000000"


@pytest.fixture(scope="session")
def documents() -> list[bytes]:
    """Read every third file, which are enough for several shards."""
    return list(read_stdlib())[::3]


@pytest.fixture(scope="session")
def stdlib(documents, tmp_path_factory) -> tuple[TextManifest, BlobFolder]:
    """Prepare the text; return its manifest and the folder of its blobs."""
    folder = BlobFolder(tmp_path_factory.mktemp("blobs"))
    return shard_documents(TextSpec(), 1024, RUN, folder.store, documents), folder


@pytest.fixture
def look(tmp_path):
    """Return a function that inspects one file with this name and content."""

    def look_at(name: str, content: bytes | str, column: str = "") -> Inspection:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return inspect(f"{path}#{column}" if column else path)

    return look_at
