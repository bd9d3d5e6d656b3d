"""The API: its description, its error handlers and its endpoints."""

from ninja import NinjaAPI

from coordinator.api import (
    machine_endpoints,
    replication_endpoints,
    run_endpoints,
    worker_endpoints,
)
from coordinator.api.errors import install_error_handlers

api = NinjaAPI(
    title="Barnraise",
    version="1",
    description="The API for workers and scripts. Machines sign every request with their Ed25519 "
    "key (`Authorization: Barnraise …`). A person's scripts send a personal token "
    "(`Authorization: Bearer brn_…`), created under Account → API tokens. An error is always a "
    "Problem: a sentence that says what to change, and a sentence for each field that it "
    "concerns. Lists are paginated: pass `next` as `after` to get the following page. A token "
    "that sends more than 300 requests a minute receives status 429.",
    docs_url="/docs",
)
install_error_handlers(api)
for module in (worker_endpoints, machine_endpoints, replication_endpoints, run_endpoints):
    api.add_router("", module.router)
