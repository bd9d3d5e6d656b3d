"""Decide by machines' opinions who is vouched for and whose updates are withheld. Pure.

Accounts cost nothing, so their number never decides. The run's owner vouches for volunteers by
their tickets. A volunteer is also vouched for, and has a vote, once the owner's machine or two
vouched volunteers find that the volunteer's updates agree with theirs, and no more find the
opposite. In the same way a volunteer is suspended whom the owner's machine doubts, or at least two
vouched volunteers and more than find the opposite. Where two volunteers that the owner vouches for
have compared the volunteer, only these decide, and on each other nobody else does: work can be
copied.

Where the owner vouches for nobody, everybody is a stranger: nobody is suspended.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from barnraise.protocol.enums import Standing
from barnraise.protocol.opinions import AGREEMENT_MS, Doubt

MIN_JUDGES = 2  # vouched volunteers that decide together

Kept = Mapping[str, int]  # author → its last update that stays; none of the others' does


@dataclass(frozen=True)
class Statement:
    """The newest opinions of one machine."""

    volunteer: str  # that the machine's ticket names
    standing: Standing  # that it names
    time_ms: int
    doubted: Mapping[str, Doubt]
    agreeing: frozenset[str]
    attested: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Judgement:
    """What the statements of all machines come to."""

    vouched: frozenset[str] | None  # volunteers; None: the owner vouches for nobody
    suspended: Mapping[str, Kept]  # volunteer → what stays of its updates


@dataclass(frozen=True)
class Admitted:
    """The volunteers whose updates count though tickets may call them newcomers."""

    let_in: frozenset[str]  # by the owner
    attested: frozenset[str]  # the others
    judges: frozenset[str]  # those of both that may attest others

    def __contains__(self, volunteer: str) -> bool:
        return volunteer in self.let_in or volunteer in self.attested


@dataclass(frozen=True)
class _View:
    """What one volunteer's machines state of another volunteer."""

    time_ms: int
    doubt: Doubt | None


def judge(statements: Iterable[Statement], cleared: Mapping[str, int]) -> Judgement:
    """Return who is vouched for and who is suspended.

    Args:
        statements: Of machines that are not excluded.
        cleared: Volunteer → until when doubts of it are void, in milliseconds since 1970.
    """
    stated: dict[str, list[Statement]] = {}  # by volunteer, the oldest first
    for statement in sorted(statements, key=lambda item: item.time_ms):
        stated.setdefault(statement.volunteer, []).append(statement)
    standings = {item.volunteer: item.standing for of_one in stated.values() for item in of_one}
    owners = {volunteer for volunteer in stated if standings[volunteer] is Standing.OWNER}
    invited = {volunteer for volunteer in stated if standings[volunteer].is_let_in}
    if not invited:
        return Judgement(None, {})
    # What others state is not even looked at: accounts without a say cost nothing.
    views: dict[str, dict[str, _View]] = {}  # volunteer → other volunteer → what that one states
    vouched: set[str] = set()
    added = invited
    while added:
        vouched |= added
        for volunteer in added:
            _add_views(views, stated.get(volunteer, []), cleared)
        added = {
            subject
            for subject, of_subject in views.items()
            if subject not in vouched and _is_accepted(of_subject, owners, (invited, vouched))
        }
    suspended = {
        subject: _merge_kept(doubts)
        for subject, of_subject in sorted(views.items())
        if subject not in owners
        and (
            doubts := _find_deciding_doubts(
                of_subject, owners, (invited,) if subject in invited else (invited, vouched)
            )
        )
    }
    return Judgement(frozenset(vouched - suspended.keys()), suspended)


def find_admitted(statements: Iterable[Statement]) -> Admitted:
    """Return the newcomers whose updates count, and those whom the owner lets in.

    A newcomer's count once the owner's machine, or two volunteers, attest that they agree. These
    are volunteers that the owner lets in, or that such ones attest. Who was admitted by others
    attests nobody: two accounts that have worked for it do not let in any number of idle ones.

    Args:
        statements: Of machines that are not excluded.
    """
    standings: dict[str, Standing] = {}
    witnesses: dict[str, set[str]] = {}  # volunteer → those that attest it
    for statement in sorted(statements, key=lambda item: item.time_ms):
        standings[statement.volunteer] = statement.standing
        for subject in statement.attested - {statement.volunteer}:
            witnesses.setdefault(subject, set()).add(statement.volunteer)
    owners = {name for name, standing in standings.items() if standing is Standing.OWNER}
    let_in = frozenset(name for name, standing in standings.items() if standing.is_let_in)

    def find_attested_by(judges: frozenset[str]) -> frozenset[str]:
        return frozenset(
            subject
            for subject, attesting in witnesses.items()
            if attesting & owners or len(attesting & judges) >= MIN_JUDGES
        )

    judges = let_in | find_attested_by(let_in)
    return Admitted(let_in, find_attested_by(judges) - let_in, judges)


def _add_views(
    views: dict[str, dict[str, _View]],
    statements: Iterable[Statement],
    cleared: Mapping[str, int],
) -> None:
    """Add what one volunteer's machines state of others; if they differ, the first doubt counts."""
    for statement in statements:
        opinions: dict[str, Doubt | None] = {
            **dict.fromkeys(statement.agreeing),
            **statement.doubted,
        }
        for subject, doubt in opinions.items():
            is_void = doubt is not None and doubt.since_ms <= cleared.get(subject, -1)
            if subject == statement.volunteer or is_void:
                continue
            of_subject = views.setdefault(subject, {})
            before = of_subject.get(statement.volunteer)
            if before is None or before.doubt is None:
                of_subject[statement.volunteer] = _View(statement.time_ms, doubt)


def _count_judges(
    views: Mapping[str, _View], groups: Iterable[Collection[str]]
) -> tuple[list[Doubt], int]:
    """Return the doubts, and how many agree, of the first group with enough judges."""
    doubts: list[Doubt] = []
    agreeing = 0
    for group in groups:
        of_group = [view for volunteer, view in views.items() if volunteer in group]
        doubts = [view.doubt for view in of_group if view.doubt is not None]
        newest = max((doubt.since_ms for doubt in doubts), default=0)
        agreeing = sum(
            view.doubt is None and view.time_ms >= newest - AGREEMENT_MS for view in of_group
        )
        if len(doubts) + agreeing >= MIN_JUDGES:
            break
    return doubts, agreeing


def _is_accepted(
    views: Mapping[str, _View], owners: Iterable[str], groups: Iterable[Collection[str]]
) -> bool:
    of_owners = [views[owner] for owner in owners if owner in views]
    if of_owners:
        return all(view.doubt is None for view in of_owners)
    doubts, agreeing = _count_judges(views, groups)
    return agreeing >= MIN_JUDGES and agreeing > len(doubts)


def _find_deciding_doubts(
    views: Mapping[str, _View], owners: Iterable[str], groups: Iterable[Collection[str]]
) -> list[Doubt]:
    """Return the doubts that suspend a volunteer; none if it is not suspended."""
    of_owners = [views[owner].doubt for owner in owners if owner in views]
    by_owner = [doubt for doubt in of_owners if doubt is not None]
    if by_owner:
        return by_owner
    doubts, agreeing = _count_judges(views, groups)
    return doubts if len(doubts) >= MIN_JUDGES and len(doubts) > agreeing else []


def _merge_kept(doubts: list[Doubt]) -> dict[str, int]:
    """Return what stays by the lower median of the doubts: no minority decides it."""
    authors = sorted({author for doubt in doubts for author in doubt.kept})
    middle = (len(doubts) - 1) // 2
    kept = {
        author: sorted(doubt.kept.get(author, 0) for doubt in doubts)[middle] for author in authors
    }
    return {author: last for author, last in kept.items() if last}
