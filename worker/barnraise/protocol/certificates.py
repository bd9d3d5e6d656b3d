"""Read the certificates that this machine trusts."""

import os
import re
import ssl
from functools import lru_cache
from pathlib import Path

import httpx

from barnraise.errors import StateError

# The first that is set counts. The last two are those of other programs: a file or a folder.
VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_HASHED_NAME = re.compile(r"[0-9a-f]{8}\.\d+")  # under which OpenSSL finds a certificate


def find_named_certificates() -> tuple[str, str]:
    """Return the variable of the environment that names certificates, and its value; or ""s."""
    values = ((name, os.environ.get(name, "").strip(" \t\r\n\"'")) for name in VARIABLES)
    return next((found for found in values if found[1]), ("", ""))


def trusted_certificates() -> ssl.SSLContext:
    """Return the trusted certificates; the environment may name others than usual.

    Reading them takes longer than a request to a machine nearby, so all clients share them.

    Raises:
        StateError: there are none where the environment says; names the variable.
    """
    return _read(*find_named_certificates())


@lru_cache(maxsize=8)
def _read(variable: str, value: str) -> ssl.SSLContext:
    problem = "which holds no certificates: a file in PEM form, a folder after `openssl rehash`"
    try:
        if not variable:
            return httpx.create_ssl_context(trust_env=False)
        # SSL_CERT_DIR may list several folders.
        paths = [Path(part) for part in value.split(os.pathsep if "DIR" in variable else "\0")]
        folders = [path for path in paths if path.is_dir()]
        if not any(path.exists() for path in paths):
            problem = "which does not exist"
        elif bool(folders) != ("DIR" in variable) and variable.startswith("SSL_CERT"):
            problem = f"which is {'a' if folders else 'no'} folder"
        elif not folders:
            return ssl.create_default_context(cafile=value)
        elif any(_HASHED_NAME.fullmatch(file.name) for path in folders for file in path.iterdir()):
            return ssl.create_default_context(capath=value)
    except OSError as error:
        if error.filename == os.environ.get("SSLKEYLOGFILE", ""):
            variable, value = "SSLKEYLOGFILE", error.filename
        if not isinstance(error, ssl.SSLError):
            problem = f"which cannot be used ({error.strerror})"
    raise StateError(f"{variable} names {value}, {problem}")
