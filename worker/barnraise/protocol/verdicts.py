"""What a run's owner or its mirrors say is to come out of the sum again. Everybody finds it in `wire`; what follows
from it, and when it is believed, is the exchange's (`exchange/verdicts.py`)."""

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
MAX_AUTHORS, MAX_SINGLE_UPDATES = 100, 200  # that one verdict may name, and single updates of each
MAX_VERDICT_BYTES = 50_000  # bytes of a verdict's text

Seq = Annotated[int, Field(ge=1, lt=1 << 53)]
Singles = Annotated[dict[Seq, Count], Field(max_length=MAX_SINGLE_UPDATES)]


class Verdict(Message):
    """What is to come out. `after`: each author's last update that stays, 0 for none. `updates`: single ones, with the
    tokens that their headers state, so that who never saw them counts alike."""

    run: Id
    after: dict[Author, Count] = Field(default={}, max_length=MAX_AUTHORS)
    updates: dict[Author, Singles] = Field(default={}, max_length=MAX_AUTHORS)
    reason: PlainText = Field(default="", max_length=100)
    issued: UnixTime


class SignedVerdict(Message):
    """A verdict's exact text, and who signed it (kind "verdict")."""

    type: Literal["signed_verdict"] = "signed_verdict"
    body: str = Field(max_length=MAX_VERDICT_BYTES)
    signatures: dict[PublicKey, Signature] = Field(min_length=1, max_length=16)
