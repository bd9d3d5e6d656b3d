"""Decide who owns a value that only one aggregate may have, such as a run its slug.

Two mirrors that cannot reach each other may both assign it. The claim with the lowest (hlc, id)
wins: that order is the same everywhere, and the earlier link is more likely to be in use already.
The other aggregates get a suffix that nobody else has. If the first disappears, the next in line
owns the value.
"""

import json
from collections import defaultdict
from collections.abc import Collection

from django.db.models import Q

from coordinator.eventlog import registry
from coordinator.eventlog.models import Aggregate, UniquenessClaim


def owns_value(aggregate: str, namespace: str, value: str) -> bool:
    """Return whether the aggregate may use the value: it has the first claim, or nobody has one."""
    claims = UniquenessClaim.objects.filter(namespace=namespace, value=value)
    owner = claims.values_list("aggregate", flat=True).first()
    return owner in (aggregate, None)


def mark_for_rewrite(aggregate: str) -> None:
    """Mark an aggregate whose row had to give up another's value, so that it is written again."""
    Aggregate.objects.filter(pk=aggregate).update(projected=False)


def update_claims(changed: Collection[Aggregate]) -> list[Aggregate]:
    """Update changed aggregates' claims; return others whose values may change as a result."""
    names, wanted = _wanted_claims(changed)
    if not names:
        return []
    stored = {
        (claim.aggregate, claim.namespace): claim
        for claim in UniquenessClaim.objects.filter(aggregate__in=names)
    }
    contested: dict[str, set[str]] = defaultdict(set)  # namespace → values
    for aggregate, namespace in stored.keys() | wanted.keys():
        old = stored.get((aggregate, namespace))
        new = wanted.get((aggregate, namespace))
        if old is None or new is None or _claim_content(old) != _claim_content(new):
            contested[namespace] |= {claim.value for claim in (old, new) if claim}
    if not contested:
        return []
    UniquenessClaim.objects.filter(aggregate__in=names).delete()
    UniquenessClaim.objects.bulk_create(wanted.values())
    touches_contested = Q(pk=None)
    for namespace, values in contested.items():
        touches_contested |= Q(namespace=namespace, value__in=values)
    others = UniquenessClaim.objects.filter(touches_contested).exclude(aggregate__in=names)
    return list(Aggregate.objects.filter(pk__in=list(others.values_list("aggregate", flat=True))))


def _wanted_claims(
    changed: Collection[Aggregate],
) -> tuple[list[str], dict[tuple[str, str], UniquenessClaim]]:
    """Return the names that may claim values, and the claims that their new states make."""
    names = []
    claims: dict[tuple[str, str], UniquenessClaim] = {}
    for aggregate in changed:
        aggregate_type = registry.aggregate_types()[aggregate.name.partition(":")[0]]
        if aggregate_type.unique_values is None:
            continue
        names.append(aggregate.name)
        if not aggregate.state:
            continue
        values = aggregate_type.unique_values(json.loads(aggregate.state))
        for namespace, (value, hlc, uuid) in values.items():
            claims[aggregate.name, namespace] = UniquenessClaim(
                aggregate=aggregate.name, namespace=namespace, value=value, hlc=hlc, uuid=uuid
            )
    return names, claims


def _claim_content(claim: UniquenessClaim) -> tuple[str, int, str]:
    return claim.value, claim.hlc, str(claim.uuid)
