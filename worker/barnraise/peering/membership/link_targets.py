"""How many links a machine has, to whom, and when it changes them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LinkTargets:
    """The bounds of a machine's links.

    Attributes:
        wanted: A machine dials until it has this many links.
        most: Above this many links it closes some.
        most_of_volunteer: To the machines of one other person.
        most_of_siblings: To the machines of this machine's own volunteer.
        least_dialled: That this machine dialled, as far as there are peers to dial: who connects is
            the choice of others.
        least_volunteers: People linked, below which those that said goodbye are dialled again soon.
        of_carrier: Of a machine whose uplink is far above its peers': it wants so many links.
        oldest: Links that are never closed for newer ones.
        least_age_seconds: A link lasts so long before this machine closes it.
        explore_seconds: Between two links beyond those wanted, ± a half.
    """

    wanted: int = 8
    most: int = 12
    most_of_volunteer: int = 2
    most_of_siblings: int = 6
    least_dialled: int = 4
    least_volunteers: int = 5
    of_carrier: int = 48
    oldest: int = 2
    least_age_seconds: float = 5.0
    explore_seconds: float = 60.0


LINK_TARGETS = LinkTargets()
