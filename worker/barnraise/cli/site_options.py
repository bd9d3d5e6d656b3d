"""Define the options of the commands that call a site's API with a personal token."""

from dataclasses import dataclass
from typing import Annotated

import typer

from barnraise.cli.machine_options import HomeOption, JsonOption, open_state_dir
from barnraise.coordinator_client.token_client import TokenClient


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

    def open_client(self) -> TokenClient:
        """Return a client of the site; the caller closes it.

        Raises:
            StateError: there is no token, or no site is known.
        """
        return TokenClient.from_environment(open_state_dir(self.home), self.site)
