"""Trials: what newcomers would change, for peers to compare. They count nowhere.

`ledger/suspension.py` decides from the peers' opinions when a newcomer's updates count.
"""

from typing import Literal

from pydantic import Field

from barnraise.protocol.messages import FragmentUpdate
from barnraise.protocol.types import Count, Message


class TrialUpdate(Message):
    """What the sender would publish now. The receiver fetches the payloads if it compares them."""

    type: Literal["trial_update"] = "trial_update"
    tokens: Count  # tokens that the sender trained on for it
    # One part for every fragment of the model, in index order.
    fragments: list[FragmentUpdate] = Field(max_length=300)

    @property
    def payload_parts(self) -> list[FragmentUpdate]:
        """Return the parts that have a payload."""
        return [part for part in self.fragments if part.size]
