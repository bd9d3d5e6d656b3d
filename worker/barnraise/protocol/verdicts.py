"""Verdicts: signed decisions of a run's owner or its mirrors to retract updates from the sum.

`exchange/ledger/verdicts.py` decides when a verdict is valid, and what follows from it.
"""

from typing import Annotated, Literal

from pydantic import Field

from barnraise.protocol.types import (
    Author,
    Count,
    Id,
    Message,
    PlainText,
    PublicKey,
    Signature,
    UnixTime,
)

MAX_VERDICTS = 500  # of one run
MAX_AUTHORS = 100  # of one verdict
MAX_SINGLE_UPDATES = 200  # of one author in one verdict
MAX_VERDICT_BYTES = 50_000  # of a verdict's text

Seq = Annotated[int, Field(ge=1, lt=1 << 53)]
Singles = Annotated[dict[Seq, Count], Field(max_length=MAX_SINGLE_UPDATES)]


class Verdict(Message):
    """Which updates of a run are retracted.

    Attributes:
        run: the run.
        after: author → its last update that stays; later ones are retracted. 0: all of them are.
        updates: author → single updates to retract, each with the tokens that its header states.
            A machine that never received such an update then counts the same tokens.
        reason: for people to read.
        issued: when the verdict was signed.
    """

    run: Id
    after: dict[Author, Count] = Field(default={}, max_length=MAX_AUTHORS)
    updates: dict[Author, Singles] = Field(default={}, max_length=MAX_AUTHORS)
    reason: PlainText = Field(default="", max_length=100)
    issued: UnixTime


class SignedVerdict(Message):
    """A verdict's exact text, with the signatures of those who decided it (kind "verdict")."""

    type: Literal["signed_verdict"] = "signed_verdict"
    body: str = Field(max_length=MAX_VERDICT_BYTES)
    signatures: dict[PublicKey, Signature] = Field(min_length=1, max_length=16)
