"""Test that variables for certificates are named in a sentence when they lead to none."""

import os
from pathlib import Path

import certifi
import pytest

from barnraise.errors import StateError
from barnraise.protocol.certificates import VARIABLES, trusted_certificates

HASH = "0a1b2c3d.0"  # under which OpenSSL finds a certificate


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Return files and folders by what they are; the environment names no certificates."""
    for name in (*VARIABLES, "SSLKEYLOGFILE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "own.pem").write_bytes(Path(certifi.where()).read_bytes())
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("no certificate")
    (tmp_path / "folder").mkdir()
    (tmp_path / "hashed").mkdir()
    (tmp_path / "hashed" / HASH).write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize(
    ("variable", "place", "reason"),
    [
        ("SSL_CERT_FILE", "missing", "which does not exist"),
        ("SSL_CERT_FILE", "folder", "which is a folder"),
        ("SSL_CERT_FILE", "empty", "which holds no certificates"),
        ("SSL_CERT_FILE", "text", "which holds no certificates"),
        ("SSL_CERT_DIR", "missing", "which does not exist"),
        ("SSL_CERT_DIR", "text", "which is no folder"),
        ("SSL_CERT_DIR", "folder", "`openssl rehash`"),
        ("REQUESTS_CA_BUNDLE", "missing", "which does not exist"),
        ("REQUESTS_CA_BUNDLE", "folder", "`openssl rehash`"),
        ("CURL_CA_BUNDLE", "text", "which holds no certificates"),
    ],
)
def test_place_without_certificates_is_named_with_its_variable(
    places, monkeypatch, variable, place, reason
):
    monkeypatch.setenv(variable, str(places / place))
    with pytest.raises(StateError) as refusal:
        trusted_certificates()
    assert str(refusal.value).startswith(f"{variable} names {places / place}, ")
    assert reason in str(refusal.value)


def test_log_of_keys_that_cannot_be_written_is_named(places, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(places / "own.pem"))
    monkeypatch.setenv("SSLKEYLOGFILE", str(places / "missing" / "log"))
    with pytest.raises(StateError, match=r"SSLKEYLOGFILE names .*log, which cannot be used \(No "):
        trusted_certificates()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SSL_CERT_FILE", certifi.where()),
        ("SSL_CERT_FILE", f'"{certifi.where()}"'),
        ("SSL_CERT_FILE", ""),
        ("SSL_CERT_DIR", f"missing{os.pathsep}hashed"),
        ("REQUESTS_CA_BUNDLE", "hashed"),
        ("CURL_CA_BUNDLE", certifi.where()),
    ],
)
def test_certificates_are_read_from_where_the_variable_says(places, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value.replace("hashed", str(places / "hashed")))
    count = trusted_certificates().cert_store_stats()["x509_ca"]
    assert (count > 50) == ("hashed" not in value), "those of a folder are read when needed"
