"""Secrets are neither printed nor logged."""

import io
import logging
import sys

import pytest

from barnraise.coordinator_client.redaction import SecretFilter, redact

KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk\n-----END OPENSSH PRIVATE KEY-----"


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("Illegal header value b'Bearer hf_abcdefghijklmnop\\n'", "abcdefghijklmnop"),
        ("token hf_ABCDEFGHIJKLMNOPQRST was refused", "ABCDEFGHIJKLMNOPQRST"),
        ("Authorization: Bearer abc.def-ghi_jkl.mno+pqr/stu=", "abc.def"),
        ("Authorization: Basic dXNlcjpwYXNzd29yZA==", "dXNlcjpwYXNz"),
        ("https://ida:s3cret@example.org/a.txt answered 401", "s3cret"),
        ("https://bucket.example.org/a.txt?X=1&Signature=c2VjcmV0&b=2", "c2VjcmV0"),
        ("https://example.org/a?access_token=t0k3n", "t0k3n"),
        ("https://t0k3n@example.org/a", "t0k3n"),
        ("https://ida:s3:cr@t@example.org/a", "s3:cr@t"),
        ("https://b.example.org/a?X-Amz-Credential=cr3d&X-Amz-Signature=abc", "cr3d"),
        ("https://b.example.org/a?x=1&X-Amz-Security-Token=t0k3n#part", "t0k3n"),
        ("https://example.org/a?client_secret=s3cret'", "s3cret"),
        ("ghp_0123456789abcdef0123", "0123456789abcdef"),
        ("github_pat_11ABCDEFG0123456789", "11ABCDEFG0123456789"),
        ("AKIAIOSFODNN7EXAMPLE", "IOSFODNN7EXAMPLE"),
        ("sk-proj-abcdefghijklmnop", "proj-abcdefghijklmnop"),
        (f"the file holds {KEY} and more", "b3BlbnNzaC1rZXk"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIEcut", "MIIEcut"),
    ],
)
def test_redact_removes_what_looks_like_a_secret(text, secret):
    assert secret in text and secret not in redact(text)


@pytest.mark.parametrize("name", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "BARNRAISE_TOKEN"])
@pytest.mark.parametrize("end", ["", "\n", "\r\n", " "])
def test_redact_removes_the_values_of_secret_variables(monkeypatch, name, end):
    monkeypatch.setenv(name, "an-unusual-value" + end)
    assert redact("refused: an-unusual-value") == "refused: …"


def test_redact_removes_each_line_of_a_token_with_line_ends(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "first-part\nsecond-part")
    assert redact("header b'Bearer first-part\\nsecond-part'") == "header b'Bearer …\\n…'"


@pytest.mark.parametrize(
    "text",
    [
        "the token budget is 10,000,000 tokens",
        "Bearer of news",
        "https://example.org:8000/a.txt?download=true",
        "https://example.org/a?keyword=barn&monkey=2, or write to ida@example.org",
        "https://example.org/@ida/a.txt",
        "fragment 3 of 12: sk-learn, hf_hub, hf:owner/name",
        "a basic tokenizer learns 2,048 tokens",
    ],
)
def test_redact_leaves_ordinary_text(text):
    assert redact(text) == text


def test_filter_redacts_arguments_and_tracebacks():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(SecretFilter())
    log = logging.Logger("redacted")
    log.addHandler(handler)
    log.warning("sent %s to %s", "hf_abcdefghijklmnop", "the hub")
    try:
        raise ValueError("Bearer hf_qrstuvwxyzabcdef")
    except ValueError:
        log.exception("failed")
    written = stream.getvalue()
    assert "sent hf_… to the hub" in written and "ValueError" in written
    assert "abcdefghijklmnop" not in written and "qrstuvwxyz" not in written
    assert sys.exc_info() == (None, None, None)
