"""A folder of blobs, each in a file that is named by its BLAKE3 digest."""

from pathlib import Path

from blake3 import blake3


class BlobFolder:
    """Store blobs as files of a folder, without the bookkeeping of `BlobStore`."""

    def __init__(self, path: Path):
        self.path = path

    def store(self, blob: bytes) -> str:
        name = blake3(blob).hexdigest()
        (self.path / name).write_bytes(blob)
        return name

    def locate(self, digest: str) -> Path:
        return self.path / digest
