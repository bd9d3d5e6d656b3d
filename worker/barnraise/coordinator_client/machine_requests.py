"""Call the coordinator where a machine is enrolled with its key, where a person has no token."""

from typing import Any
from urllib.parse import quote, urlencode

from pydantic import RootModel

from barnraise.coordinator_client.client import CoordinatorClient
from barnraise.state_dir import StateDir


class Json(RootModel[Any]):
    """Any JSON value."""


class MachineRequests(CoordinatorClient):
    """The coordinator where a machine is enrolled, as the machine's own commands see it."""

    def __init__(self, state_dir: StateDir) -> None:
        membership = state_dir.membership
        super().__init__(membership.url, state_dir.identity, membership.mirror.key)

    def request_json(self, method: str, *path: str, body: Any = None, **query: Any) -> Any:
        """Send one signed request, and return the answer's JSON."""
        address = "/" + "/".join(quote(part, safe="") for part in path)
        if query:
            address += f"?{urlencode(query)}"
        return self.request(method, address, None if body is None else Json(body), Json).root
