"""How long the signed header of an update is, in bytes."""

from barnraise.protocol.messages import MAX_CREW_MEMBERS


def max_header_bytes(fragments: int) -> int:
    """Return the longest encoding of the header of a model of so many fragments.

    Two headers must fit into one proof of a fork.
    """
    return 900 + 200 * fragments


def max_crew_members(fragments: int) -> int:
    """Return of how many members, besides the lead, such a header has room for the tokens."""
    return min(MAX_CREW_MEMBERS, fragments - 1)


# Of a model with a few fragments. Only where models and uplinks are tiny do headers count: each
# part of a round has one.
TYPICAL_HEADER_BYTES = max_header_bytes(8)
