"""Read the certificates that this machine trusts."""

import os
import ssl
from functools import lru_cache

import httpx


def trusted_certificates() -> ssl.SSLContext:
    """Return the trusted certificates; SSL_CERT_FILE and SSL_CERT_DIR may name others than usual.

    Reading them takes longer than a request to a machine nearby, so all clients share them.
    """
    return _read(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


@lru_cache(maxsize=8)
def _read(file: str | None, folder: str | None) -> ssl.SSLContext:
    """Read what these variables of the environment name; httpx takes them from there."""
    return httpx.create_ssl_context()
