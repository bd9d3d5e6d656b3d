"""The API itself: its name, its one shape of a refusal, its documentation. The endpoints are in the modules beside."""

from typing import Any

from ninja import NinjaAPI

from barnraise.protocol.coordinator_messages import Problem
from coordinator.api.errors import install_error_handlers

REFUSALS = frozenset({400, 401, 403, 404, 409, 413, 422, 429, 503})

api = NinjaAPI(
    title="Barnraise",
    version="1",
    description="What workers and scripts call. Machines sign every request with their Ed25519 key (`Authorization: "
    "Barnraise …`); a person's scripts show a personal token (`Authorization: Bearer brn_…`), made under API tokens. "
    "A refusal is always a Problem: a sentence that says what to change, and sentences for the fields it is about. "
    "Lists come in pages: pass the `next` of one as `after` for the one that follows. Past 300 requests a minute a "
    "token is told to wait by a 429.",
    docs_url="/docs",
)
install_error_handlers(api)


def responses(shape: Any) -> dict:
    """What an endpoint may answer, for the documentation."""
    return {200: shape, REFUSALS: Problem}
