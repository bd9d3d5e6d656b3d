"""Verdicts: signed decisions of a run's owner or its mirrors to remove updates and to exclude.

`ledger/verdict_set.py` decides when a verdict is valid, and what follows from it.
"""

from typing import Annotated, Literal

from pydantic import Field

from barnraise.protocol.types import (
    Author,
    Count,
    Digest,
    DocumentText,
    Id,
    Message,
    PlainText,
    PublicKey,
    Signature,
    UnixTime,
)

MAX_AUTHORS = 100  # of one verdict
MAX_SINGLE_UPDATES = 200  # of one author in one verdict
MAX_VERDICT_BYTES = 50_000  # of a verdict's text
MAX_SIGNATURES = 40  # of one verdict: every mirror of a list may sign it, and the owner
MAX_NAMES = 256  # of one `VerdictNames`
SUMMARY_WIDTH = 16  # digests of one `VerdictSummary`: one for each next hexadecimal digit

Seq = Annotated[int, Field(ge=1, lt=1 << 53)]
Singles = Annotated[dict[Seq, Count], Field(max_length=MAX_SINGLE_UPDATES)]
KeptUpdates = Annotated[dict[Author, Count], Field(max_length=MAX_AUTHORS)]
NamePrefix = Annotated[str, Field(pattern=r"^[0-9a-f]{0,63}$")]


class Verdict(Message):
    """The retracted updates of a run, and the parties that are excluded from it."""

    run: Id
    # Author → its last update that stays; later ones are retracted. 0: all of them are.
    after: dict[Author, Count] = Field(default={}, max_length=MAX_AUTHORS)
    # Author → single updates to retract, each with the tokens that its header states. A machine
    # that never received such an update then counts the same tokens.
    updates: dict[Author, Singles] = Field(default={}, max_length=MAX_AUTHORS)
    # Excluded machines: key → its authors with updates that stay, each with the last one that does.
    # Everything else that the key signed or will sign is retracted.
    keys: dict[PublicKey, KeptUpdates] = Field(default={}, max_length=MAX_AUTHORS)
    # Excluded people, by the digest in their tickets, as `keys`: all their keys.
    volunteers: dict[Digest, KeptUpdates] = Field(default={}, max_length=MAX_AUTHORS)
    # Volunteers of whom nothing is withheld that machines suspended before `issued`.
    cleared: list[Digest] = Field(default=[], max_length=MAX_AUTHORS)
    # Of the mirror list under which mirrors signed this; 0: of the run's own mirrors.
    mirror_list_version: Count = 0
    reason: PlainText = Field(default="", max_length=100)  # for people to read
    issued: UnixTime


class SignedVerdict(Message):
    """A verdict's exact text, with the signatures of those who decided it (kind "verdict")."""

    type: Literal["signed_verdict"] = "signed_verdict"
    body: DocumentText = Field(max_length=MAX_VERDICT_BYTES)
    signatures: dict[PublicKey, Signature] = Field(min_length=1, max_length=MAX_SIGNATURES)


# ---- how peers find what one of them lacks ----------------------------------------------------


class VerdictSummary(Message):
    """Digests of the sender's proofs whose names begin with `prefix`, by the digit that follows.

    A proof's name is a digest of what it proves and of who signed it. None: there is no such proof.
    """

    type: Literal["verdict_summary"] = "verdict_summary"
    prefix: NamePrefix
    digests: list[Digest | None] = Field(min_length=SUMMARY_WIDTH, max_length=SUMMARY_WIDTH)


class VerdictNames(Message):
    """The names of all of the sender's proofs that begin with `prefix`.

    The receiver sends the proofs that are missing from it and, unless this is an answer, its own
    names, if the sender has proofs that the receiver lacks.
    """

    type: Literal["verdict_names"] = "verdict_names"
    prefix: NamePrefix
    names: list[Digest] = Field(max_length=MAX_NAMES)
    is_answer: bool = False
