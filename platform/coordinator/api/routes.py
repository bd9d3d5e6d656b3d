"""Every address of the API, by the modules that serve them."""

from coordinator.api import endpoints, machines, mirrors, runs
from coordinator.api.site import api

SERVED_BY = (endpoints, machines, mirrors, runs)
__all__ = ["SERVED_BY", "api"]
