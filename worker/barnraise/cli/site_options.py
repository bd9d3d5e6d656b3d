"""Define the options of the commands that call a site's API with a personal token."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from barnraise.cli.addresses import RunAddress, parse_site_address
from barnraise.cli.console import print_json
from barnraise.cli.machine_options import HomeOption, JsonOption, open_state_dir
from barnraise.coordinator_client.token_client import TokenClient, read_token
from barnraise.errors import StateError


@dataclass(frozen=True)
class SiteOptions:
    """The site to call, and the form of the answer. The token is in $BARNRAISE_TOKEN."""

    site: Annotated[
        str,
        typer.Option(
            "--site",
            envvar="BARNRAISE_SITE",
            help="The site (default: where this machine is enrolled).",
        ),
    ] = ""
    home: HomeOption = None
    as_json: JsonOption = False

    def open_client(self, run: RunAddress | None = None) -> TokenClient:
        """Return a client of the site; the caller closes it.

        A token goes to the site that its owner has chosen, and not wherever a pasted address
        points. The address of `run` may name the site as well.

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
        token = read_token()
        return TokenClient(site or named or state_dir.membership.url, token)

    def request(
        self, method: str, *path: str, body: Any = None, run: RunAddress | None = None
    ) -> Any:
        """Send one request as `TokenClient.request` does; the path is below that of `run`."""
        with closing(self.open_client(run)) as client:
            return client.request(method, *_path_below(run), *path, body=body)

    def fetch_all(self, *path: str, run: RunAddress | None = None) -> list[dict[str, Any]]:
        """Fetch all items of a list; the path is below that of `run`."""
        with closing(self.open_client(run)) as client:
            return client.fetch_all(*_path_below(run), *path)

    def print_answer(self, answer: Any, print_text: Callable[[Any], object]) -> None:
        """Print an answer as JSON if that is requested, and otherwise by `print_text`."""
        if self.as_json:
            print_json(answer)
        else:
            print_text(answer)


def _path_below(run: RunAddress | None) -> tuple[str, ...]:
    return ("runs", run.name) if run is not None else ()
