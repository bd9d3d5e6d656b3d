"""Words that only one may have, such as a run's slug: two mirrors that cannot see each other both give it away.

The lowest (hlc, id) keeps it, because that order is the same everywhere and the earlier link is the likelier to be out
in the world; the others go by a suffix that no other has. Should the first vanish, the next in line has the word.
"""

import json
from collections import defaultdict
from collections.abc import Collection

from django.db.models import Q

from coordinator.eventlog import registry
from coordinator.eventlog.models import Aggregate, UniquenessClaim


def owns_value(subject: str, space: str, word: str) -> bool:
    """Whether the word is this subject's."""
    first = (
        UniquenessClaim.objects.filter(space=space, word=word)
        .values_list("subject", flat=True)
        .first()
    )
    return first in (subject, None)


def mark_for_rewrite(subject: str) -> None:
    """Its row had a word that is another's, and was given the one that no other has: it is written anew."""
    Aggregate.objects.filter(pk=subject).update(stored=False)


def update_claims(changed: Collection[Aggregate]) -> list[Aggregate]:
    """Claims as the new states make them. Returns the other subjects whose words may thereby be others."""
    wanted: dict[tuple[str, str], UniquenessClaim] = {}
    concerned = []
    for subject in changed:
        kind = registry.aggregate_types()[subject.name.partition(":")[0]]
        if kind.unique_values is registry.no_unique_values:
            continue
        concerned.append(subject.name)
        words = kind.unique_values(json.loads(subject.state)) if subject.state else {}
        for space, (word, hlc, uuid) in words.items():
            wanted[subject.name, space] = UniquenessClaim(
                subject=subject.name, space=space, word=word, hlc=hlc, uuid=uuid
            )
    if not concerned:
        return []
    before = {
        (each.subject, each.space): each
        for each in UniquenessClaim.objects.filter(subject__in=concerned)
    }
    touched: dict[str, set[str]] = defaultdict(set)
    for place in before.keys() | wanted.keys():
        old, new = before.get(place), wanted.get(place)
        if (
            old is None
            or new is None
            or (old.word, old.hlc, str(old.uuid)) != (new.word, new.hlc, str(new.uuid))
        ):
            touched[place[1]] |= {claim.word for claim in (old, new) if claim}
    if not touched:
        return []
    UniquenessClaim.objects.filter(subject__in=concerned).delete()
    UniquenessClaim.objects.bulk_create(wanted.values())
    said = Q(pk=None)
    for space, words in touched.items():
        said |= Q(space=space, word__in=words)
    others = (
        UniquenessClaim.objects.filter(said)
        .exclude(subject__in=concerned)
        .values_list("subject", flat=True)
    )
    return list(Aggregate.objects.filter(pk__in=list(others)))
