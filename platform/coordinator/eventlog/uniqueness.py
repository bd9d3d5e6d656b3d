"""Words that only one may have, such as a run's slug: two mirrors that cannot see each other both give it away.

The lowest (hlc, id) keeps it, because that order is the same everywhere and the earlier link is the likelier to be out
in the world; the others go by a suffix that no other has. Should the first vanish, the next in line has the word.
"""

import json
from collections import defaultdict
from collections.abc import Collection

from django.db.models import Q

from coordinator.eventlog import registry
from coordinator.eventlog.models import Claim, Subject


def has(subject: str, space: str, word: str) -> bool:
    """Whether the word is this subject's."""
    first = Claim.objects.filter(space=space, word=word).values_list("subject", flat=True).first()
    return first in (subject, None)


def evicted(subject: str) -> None:
    """Its row had a word that is another's, and was given the one that no other has: it is written anew."""
    Subject.objects.filter(pk=subject).update(stored=False)


def settle(changed: Collection[Subject]) -> list[Subject]:
    """Claims as the new states make them. Returns the other subjects whose words may thereby be others."""
    wanted: dict[tuple[str, str], Claim] = {}
    concerned = []
    for subject in changed:
        kind = registry.registered()[subject.name.partition(":")[0]]
        if kind.words is registry.no_words:
            continue
        concerned.append(subject.name)
        words = kind.words(json.loads(subject.state)) if subject.state else {}
        for space, (word, hlc, uuid) in words.items():
            wanted[subject.name, space] = Claim(
                subject=subject.name, space=space, word=word, hlc=hlc, uuid=uuid
            )
    if not concerned:
        return []
    before = {
        (each.subject, each.space): each for each in Claim.objects.filter(subject__in=concerned)
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
    Claim.objects.filter(subject__in=concerned).delete()
    Claim.objects.bulk_create(wanted.values())
    said = Q(pk=None)
    for space, words in touched.items():
        said |= Q(space=space, word__in=words)
    others = (
        Claim.objects.filter(said).exclude(subject__in=concerned).values_list("subject", flat=True)
    )
    return list(Subject.objects.filter(pk__in=list(others)))
