"""Opinions: what a machine states of the volunteers whose updates it has compared with its own.

`ledger/suspension.py` decides what follows from the opinions of many machines.
"""

from typing import Annotated, Literal

from pydantic import Field

from barnraise.protocol.messages import Signed
from barnraise.protocol.types import Author, Count, Digest, Id, Message, PublicKey, UnixMilliseconds

MAX_DOUBTED = 128  # volunteers that one machine doubts
MAX_AGREEING = 256  # volunteers whose updates agree with one machine's
MAX_ATTESTED = 256  # volunteers whose updates have agreed with one machine's at any time
MAX_KEPT = 100  # authors of a doubted volunteer with updates that stay
MAX_ALL_KEPT = 750  # of all doubted volunteers, so that opinions fit into a message
RENEWAL_MS = 3600 * 1000  # after which unchanged opinions are stated again
AGREEMENT_MS = 2 * RENEWAL_MS  # before a doubt: who agreed earlier may have left since

Kept = Annotated[dict[Author, Count], Field(max_length=MAX_KEPT)]


class Doubt(Message):
    """The updates of a volunteer do not agree with those of the machine that states it."""

    since_ms: UnixMilliseconds  # when the machine began to doubt
    # The volunteer's authors with updates that stay → the last one that does.
    kept: Kept = {}


class Opinions(Message):
    """What a machine states, from `time_ms` on, in place of everything that it stated before."""

    run: Id
    peer: PublicKey
    time_ms: UnixMilliseconds
    doubted: dict[Digest, Doubt] = Field(default={}, max_length=MAX_DOUBTED)  # by volunteer
    agreeing: list[Digest] = Field(default=[], max_length=MAX_AGREEING)  # volunteers
    # Volunteers that have agreed with the machine at any time, the first ones; none ever leaves.
    attested: list[Digest] = Field(default=[], max_length=MAX_ATTESTED)


class SignedOpinions(Message):
    """A machine's opinions (kind "opinions"), and the ticket that says whose machine it is."""

    type: Literal["signed_opinions"] = "signed_opinions"
    opinions: Signed
    ticket: Signed
