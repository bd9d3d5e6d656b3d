"""Define the options of the commands that call a site's API as scripts do.

They send the personal token in $BARNRAISE_TOKEN. What a machine may see and change as well is
requested with its key where there is no token.
"""

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from barnraise.cli.addresses import RunAddress, parse_site_address
from barnraise.cli.console import print_json
from barnraise.cli.machine_options import HomeOption, JsonOption, open_state_dir
from barnraise.cli.option_groups import option
from barnraise.coordinator_client.client import CoordinatorClient
from barnraise.coordinator_client.token_client import (
    TOKEN_VARIABLE,
    TokenClient,
    read_token,
)
from barnraise.errors import StateError


@dataclass(frozen=True)
class SiteOptions:
    """The site to call, and the form of the answer. The token is in $BARNRAISE_TOKEN."""

    site: str = option(
        "", "The site (default: where this machine is enrolled).", envvar="BARNRAISE_SITE"
    )
    home: HomeOption = None
    as_json: JsonOption = False

    @property
    def enrolled_machine(self) -> str:
        """Return this machine's id at the site; "" if it is not enrolled there."""
        state_dir = open_state_dir(self.home)
        if not state_dir.is_enrolled:
            return ""
        membership = state_dir.membership
        is_own_site = not self.site or parse_site_address(self.site) == membership.url
        return membership.machine if is_own_site else ""

    def open_client(
        self, run: RunAddress | None = None, *, as_machine: bool = False
    ) -> CoordinatorClient:
        """Return a client of the site; the caller closes it.

        A token goes to the site that its owner has chosen, and not wherever a pasted address
        points. The address of `run` may name the site as well.

        Args:
            run: what the requests are about.
            as_machine: whether this machine's key does where there is no token.

        Raises:
            StateError: there is no token, no site is known, or the run is at another site.
        """
        state_dir = open_state_dir(self.home)
        site = parse_site_address(self.site) if self.site else ""
        if not site and state_dir.is_enrolled:
            site = state_dir.membership.url
        named = run.site if run is not None else ""
        if named and site and named != site:
            raise StateError(f"that run is at {named}, and not at {site}: choose with --site")
        is_own_site = state_dir.is_enrolled and site == state_dir.membership.url
        if as_machine and is_own_site and not os.environ.get(TOKEN_VARIABLE, "").strip():
            return CoordinatorClient.from_state_dir(state_dir)
        token = read_token()
        return TokenClient(site or named or state_dir.membership.url, token)

    def request(
        self,
        method: str,
        *path: str,
        body: Any = None,
        run: RunAddress | None = None,
        as_machine: bool = False,
    ) -> Any:
        """Send one request as `TokenClient.request_json` does; the path is below that of `run`."""
        with closing(self.open_client(run, as_machine=as_machine)) as client:
            return client.request_json(method, *_path_below(run), *path, body=body)

    def fetch_all(
        self, *path: str, run: RunAddress | None = None, as_machine: bool = False
    ) -> list[dict[str, Any]]:
        """Fetch all items of a list, page after page; the path is below that of `run`."""
        items: list[dict[str, Any]] = []
        query: dict[str, Any] = {}
        with closing(self.open_client(run, as_machine=as_machine)) as client:
            while True:
                page = client.request_json("GET", *_path_below(run), *path, **query)
                items += page["items"]
                if not page["next"]:
                    return items
                query = {"after": page["next"]}

    def print_answer(self, answer: Any, print_text: Callable[[Any], object]) -> None:
        """Print an answer as JSON if that is requested, and otherwise by `print_text`."""
        if self.as_json:
            print_json(answer)
        else:
            print_text(answer)


def _path_below(run: RunAddress | None) -> tuple[str, ...]:
    return ("runs", run.name) if run is not None else ()
