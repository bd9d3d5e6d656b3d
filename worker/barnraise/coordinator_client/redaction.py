"""Remove secrets from what is printed or logged: tokens, passwords in addresses, private keys."""

import logging
import os
import re
import traceback

HIDDEN = "…"  # stands in place of a secret
# Variables whose values are secrets, whatever they look like.
SECRET_VARIABLES = (
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "HUGGINGFACE_HUB_TOKEN",
    "BARNRAISE_TOKEN",
)
MIN_SECRET_LENGTH = 6  # a shorter value would hide parts of ordinary words
_PATTERNS = (
    # Tokens with a well-known prefix: Hugging Face, GitHub, GitLab, OpenAI, Slack, AWS.
    re.compile(
        r"\b(hf_|api_org_|gh[opsu]_|github_pat_|glpat-|sk-|xox[abp]-|AKIA)[\w-]{12,}", re.ASCII
    ),
    re.compile(r"((?:bearer|basic|token)\s+)[\w.~+/=-]{16,}", re.I | re.ASCII),
    # In addresses: a name's password, or a token in the place of the name; parts of the query.
    re.compile(r"(//[^/\s:@'\"]*:)[^/\s'\"]+(?=@)"),
    re.compile(r"(://)[^/\s:@?#'\"]+(?=@)"),
    re.compile(
        r"([?&](?:[\w.-]*[-_.])?(?:token|key|key[-_]?id|apikey|accesskeyid|signature|sig|auth"
        r"|secret|credential|password|passwd|pwd)=)[^&#\s'\"]+",
        re.I,
    ),
    re.compile(
        r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S
    ),
)


def redact(text: str) -> str:
    """Replace the secrets in a text; a prefix that says what kind of secret it was remains."""
    for name in SECRET_VARIABLES:
        for part in os.environ.get(name, "").split():  # a pasted token may have line ends in it
            if len(part) >= MIN_SECRET_LENGTH:
                text = text.replace(part, HIDDEN)
    for pattern in _PATTERNS:
        text = pattern.sub(lambda match: match[1] + HIDDEN, text)
    return text


class SecretFilter(logging.Filter):
    """Redact each record, with its traceback, before a handler writes it."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Replace the record's message by its redacted form; let every record pass."""
        record.msg = redact(record.getMessage())
        record.args = None
        if record.exc_info:
            plain = "".join(traceback.format_exception(*record.exc_info))
            redacted = redact(plain)
            if redacted != plain:
                record.msg = f"{record.msg}\n{redacted}"
                record.exc_info = None
                record.exc_text = None
        return True
