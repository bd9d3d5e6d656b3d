"""The proof that an author signed two different updates with one identity, and all proofs."""

from typing import Literal

from barnraise.protocol.messages import Signed
from barnraise.protocol.opinions import SignedOpinions
from barnraise.protocol.types import Message
from barnraise.protocol.verdicts import SignedVerdict


class Fork(Message):
    """Two different updates that one author signed with one sequence number.

    `ticket` is any ticket of the author: only keys that took part in the run can fork.
    """

    type: Literal["fork"] = "fork"
    one: Signed
    other: Signed
    ticket: Signed


Proof = SignedVerdict | Fork | SignedOpinions
