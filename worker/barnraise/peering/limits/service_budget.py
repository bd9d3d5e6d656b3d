"""Count what each group of others has used of a service."""

from collections.abc import Mapping

from barnraise.peering.limits.rate_limit import TokenBuckets
from barnraise.peering.limits.service_limits import SERVICE_LIMITS, Service


class ServiceBudget:
    """What each group may still use of a service.

    A use belongs to a group of each kind: `names` has their names by kind, but for "all". Times are
    in seconds.
    """

    def __init__(self, service: Service) -> None:
        self._buckets = {
            group: TokenBuckets(rate) for group, rate in SERVICE_LIMITS[service].items()
        }

    def try_consume(self, names: Mapping[str, str], now: float) -> bool:
        """Count one use if all groups that it belongs to may have one more; return whether."""
        return all(
            buckets.try_consume(names.get(group, ""), 1.0, now)
            for group, buckets in self._buckets.items()
        )

    def consume(self, names: Mapping[str, str], amount: float, now: float) -> None:
        """Count uses that have happened, or are given back where `amount` is negative."""
        for group, buckets in self._buckets.items():
            buckets.consume(names.get(group, ""), amount, now)

    def ready_at(self, names: Mapping[str, str], now: float) -> float:
        """Return when all groups may have one more use, in seconds."""
        return max(
            buckets.ready_at(names.get(group, ""), now) for group, buckets in self._buckets.items()
        )
