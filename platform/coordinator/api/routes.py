"""Every address of the API, by the modules that serve them."""

from coordinator.api import (
    machine_endpoints,
    replication_endpoints,
    run_endpoints,
    worker_endpoints,
)
from coordinator.api.ninja_api import api

SERVED_BY = (worker_endpoints, machine_endpoints, replication_endpoints, run_endpoints)
__all__ = ["SERVED_BY", "api"]
