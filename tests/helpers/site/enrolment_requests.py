"""Build the request of a machine that wants to belong to somebody."""

import time

from barnraise.protocol.coordinator_messages import EnrolmentRequest, MachineDescription
from barnraise.protocol.signing import Identity
from coordinator.lib import site_identity

ABOUT = MachineDescription(hostname="barn-pc", system="Linux", cores=8, memory_bytes=1 << 34)


def enrolment_request(identity: Identity, **changed) -> EnrolmentRequest:
    """Build a request to this site for a key; `changed` replaces its fields."""
    fields = {
        "mirror": site_identity.identity().key,
        "key": identity.key,
        "machine": ABOUT,
        "issued": time.time(),
    }
    return EnrolmentRequest(**{**fields, **changed})
