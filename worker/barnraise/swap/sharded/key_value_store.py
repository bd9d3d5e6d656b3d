"""Torch's key-value store, in which ranks find each other and show that they live."""

from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]: torch documents these names
    Store,  # pyright: ignore[reportPrivateImportUsage]: as above
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]: as above
)


@dataclass(frozen=True)
class StoreAddress:
    """Where the ranks' key-value store listens.

    Attributes:
        host: name or address.
        port: TCP port.
        prefix: of all keys; a later attempt of the same ranks has another one.
    """

    host: str
    port: int
    prefix: str = "barnraise/0"

    def connect(self, seconds: float) -> Store:
        """Connect to the store, whose answers may take so long.

        Raises:
            RuntimeError: nothing answers there in time.
        """
        timeout = timedelta(seconds=seconds)
        store = TCPStore(
            self.host, self.port, is_master=False, timeout=timeout, wait_for_workers=False
        )
        return PrefixStore(self.prefix, store)


def serve_store(host: str, port: int, seconds: float, listener: int | None = None) -> Store:
    """Serve a store for as long as what is returned lives; `listener` is a socket that listens."""
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        master_listen_fd=listener,
    )


def first_line(error: BaseException) -> str:
    """Return what an error says in its first line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
