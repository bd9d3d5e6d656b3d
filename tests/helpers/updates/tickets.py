"""Sign tickets for tests that have no coordinator."""

from barnraise.protocol.messages import Signed, Ticket
from barnraise.protocol.signing import Identity

RUN = "00000000-0000-7000-8000-000000000001"


def sign_ticket(mirror: Identity, peer: str, **fields) -> Signed:
    """Return a ticket of a mirror that permits 1,000 tokens a second for a day.

    Args:
        mirror: The mirror's identity.
        peer: The key that the ticket is for.
        fields: Fields of the ticket that differ; without `expires` it is valid for a day.
    """
    issued = fields.get("issued", 0.0)
    usual = {
        "run": RUN,
        "peer": peer,
        "machine": RUN,
        "volunteer": "0" * 64,
        "roles": [],
        "max_tokens_per_second": 1000,
        "issued": issued,
        "expires": issued + 86_400,
        "mirror": mirror.key,
    }
    return mirror.sign("ticket", Ticket(**(usual | fields)))
