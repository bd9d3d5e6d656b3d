"""Every address of the API, by the modules that serve them."""

from coordinator.api import endpoints, machines, runs
from coordinator.api.site import api

SERVED_BY = (endpoints, machines, runs)
__all__ = ["SERVED_BY", "api"]
