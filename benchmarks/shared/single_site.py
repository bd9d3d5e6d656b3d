"""A coordinator without other mirrors, for what a worker asks a `FailoverClient`."""

from collections.abc import Sequence

from barnraise.coordinator_client.client import CoordinatorClient
from barnraise.protocol.mirror_list import SignedMirrorList


class SingleSite(CoordinatorClient):
    """Answer as a `FailoverClient` that knows one mirror, and no list of them."""

    @property
    def keys(self) -> frozenset[str]:
        """Return the keys of all mirrors that may direct this machine."""
        return frozenset({self.mirror})

    def select_mirror(self) -> str:
        """Return the key of the mirror that the next calls go to: always this one."""
        return self.mirror

    @property
    def is_reachable(self) -> bool:
        """Return whether a check between two calls found an answer: nobody checks here."""
        return False

    @property
    def mirror_lists(self) -> list[SignedMirrorList]:
        """Return the stored chain of mirror lists: none with a single coordinator."""
        return []

    def receive_mirror_lists(self, lists: Sequence[SignedMirrorList]) -> None:
        """Ignore mirror lists: only the key that was pinned at login is trusted."""

    def confirmed_anchors(self, run: str) -> dict[str, str]:
        """Return the anchors that the site's mirrors list as confirmed: none are kept here."""
        return {}

    def request_anchors(self) -> None:
        """Do nothing: only a `FailoverClient` keeps confirmed anchors."""
