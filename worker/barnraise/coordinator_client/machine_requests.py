"""Call the coordinator where a machine is enrolled with its key, where a person has no token."""

from barnraise.coordinator_client.client import CoordinatorClient
from barnraise.state_dir import StateDir


class MachineRequests(CoordinatorClient):
    """The coordinator where a machine is enrolled, as the machine's own commands see it."""

    def __init__(self, state_dir: StateDir) -> None:
        membership = state_dir.membership
        super().__init__(membership.url, state_dir.identity, membership.mirror.key)
