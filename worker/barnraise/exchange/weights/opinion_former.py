"""Form this machine's opinions of other volunteers from what it compares, round by round. Pure.

One round proves little, and an opinion that changes would withhold updates and count them again.
So a volunteer is doubted after some rounds of doubt in a row and from then on: only rounds of
agreement, or the owner's verdict, end a doubt. What stays of a doubted volunteer's updates are
those before the last rounds of agreement, because a sum over rounds shows harm late.

A volunteer is attested once after as many rounds of full agreement. Updates of a much slower
machine agree less, and late in a training those of all do: then more rounds are needed.
"""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from barnraise.exchange.weights.weighting import FULL_AGREEMENT, NO_AGREEMENT
from barnraise.ledger.verdict_set import VerdictSet
from barnraise.planning.round_limits import LATE_ROUNDS, OPINION_ROUNDS, WEAK_ROUNDS
from barnraise.protocol.messages import Update
from barnraise.protocol.opinions import (
    MAX_AGREEING,
    MAX_ALL_KEPT,
    MAX_ATTESTED,
    MAX_DOUBTED,
    MAX_KEPT,
    RENEWAL_MS,
    Doubt,
)
from barnraise.protocol.table_sizes import FEW, store_newest


@dataclass
class _Record:
    """What was compared of one volunteer."""

    first: dict[str, int] = field(default_factory=dict)  # author → its last update before these
    seqs: dict[str, int] = field(default_factory=dict)  # author → its last update
    # The same at the ends of the last rounds of agreement.
    agreed: deque[dict[str, int]] = field(default_factory=lambda: deque(maxlen=LATE_ROUNDS))
    doubted_rounds: int = 0  # in a row
    agreed_rounds: int = 0  # in a row
    attesting_rounds: float = 0.0  # in a row; those of little agreement count for less

    def last_good(self, author: str) -> int | None:
        """Return an author's last update that is no reason for a doubt; None if none was seen."""
        if author not in self.first:
            return None
        good = self.agreed[0] if len(self.agreed) == LATE_ROUNDS else {}
        return good.get(author, self.first[author])


@dataclass(frozen=True)
class FormedOpinions:
    """What a machine is to state."""

    doubted: dict[str, Doubt]  # by volunteer
    agreeing: list[str]  # volunteers
    attested: list[str]  # volunteers


class OpinionFormer:
    """Counts rounds of doubt and of agreement, and says what to state."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}  # by volunteer, the last one heard of at the end

    def record_update(self, update: Update) -> None:
        """Record an update of another volunteer that is compared."""
        record = self._records.get(update.volunteer) or _Record()
        store_newest(self._records, update.volunteer, record, FEW)
        record.first.setdefault(update.author, update.seq - 1)
        record.seqs[update.author] = update.seq

    def record_trial(self, volunteer: str) -> None:
        """Record a newcomer's trial that is compared: no update of it counts yet."""
        record = self._records.get(volunteer) or _Record()
        store_newest(self._records, volunteer, record, FEW)

    def record_round(
        self, agreements: Mapping[str, float], doubted: Collection[str], can_judge: bool = True
    ) -> None:
        """Record what a round of this machine has shown.

        Args:
            agreements: Volunteer → agreement, see `contribution.py`.
            doubted: Those of them that count for nothing.
            can_judge: False if those that are vouched for hardly agree themselves.
        """
        for volunteer, record in self._records.items():
            agreement = agreements.get(volunteer)
            is_doubted = volunteer in doubted
            agrees = not is_doubted and agreement is not None and agreement >= FULL_AGREEMENT
            record.doubted_rounds = record.doubted_rounds + 1 if is_doubted else 0
            record.agreed_rounds = record.agreed_rounds + 1 if agrees else 0
            if agrees:
                record.agreed.append(dict(record.seqs))
            lowest = NO_AGREEMENT if can_judge else -NO_AGREEMENT
            if agrees:
                record.attesting_rounds += 1.0
            elif not is_doubted and agreement is not None and agreement > lowest:
                record.attesting_rounds += OPINION_ROUNDS / WEAK_ROUNDS
            else:
                record.attesting_rounds = 0.0

    def record_harm(self, agreements: Mapping[str, float], doubted: Collection[str]) -> None:
        """Record what a part of a round has shown: who pulls against it is doubted at once.

        No noise pulls against a machine as much as honest ones agree with it.
        """
        for volunteer in doubted:
            record = self._records.get(volunteer)
            if record is not None and agreements[volunteer] <= -FULL_AGREEMENT:
                record.doubted_rounds = max(record.doubted_rounds, OPINION_ROUNDS)
                record.agreed_rounds = 0
                record.attesting_rounds = 0.0

    def form(
        self, key: str, verdicts: VerdictSet, vector: Mapping[str, int], now_ms: int
    ) -> FormedOpinions | None:
        """Return whom this machine, of this key, doubts, who agrees with it and whom it attests.

        Returns:
            None if this machine has stated the same, and not too long ago.
        """
        stated = verdicts.statements.get(key)
        doubted = dict(stated.doubted) if stated else {}
        agreeing = dict.fromkeys(sorted(stated.agreeing if stated else ()))
        for volunteer, doubt in [*doubted.items()]:
            if verdicts.is_settled(volunteer, doubt.since_ms):
                del doubted[volunteer]
        for volunteer, record in self._records.items():
            if record.agreed_rounds >= OPINION_ROUNDS:
                doubted.pop(volunteer, None)
                store_newest(agreeing, volunteer, None, MAX_AGREEING)
            elif record.doubted_rounds >= OPINION_ROUNDS and volunteer not in doubted:
                agreeing.pop(volunteer, None)
                doubt = self._doubt(volunteer, record, verdicts, vector, now_ms)
                kept_authors = sum(len(other.kept) for other in (doubt, *doubted.values()))
                if len(doubted) < MAX_DOUBTED and kept_authors <= MAX_ALL_KEPT:
                    doubted[volunteer] = doubt
        attested = self._extend_attested(stated.attested if stated else frozenset(), doubted)
        is_same = stated and (stated.doubted, stated.agreeing, {*stated.attested}) == (
            doubted,
            agreeing.keys(),
            {*attested},
        )
        if is_same and stated and now_ms < stated.time_ms + RENEWAL_MS:
            return None
        return FormedOpinions(doubted, [*agreeing], attested)

    def _extend_attested(self, attested: Collection[str], doubted: Collection[str]) -> list[str]:
        """Return whom this machine has attested at any time: nobody leaves, and few more come."""
        new = [
            volunteer
            for volunteer, record in self._records.items()
            if record.attesting_rounds > OPINION_ROUNDS - 1e-6
            and volunteer not in attested
            and volunteer not in doubted
        ]
        return sorted([*attested, *new[: max(0, MAX_ATTESTED - len(attested))]])

    def _doubt(
        self,
        volunteer: str,
        record: _Record,
        verdicts: VerdictSet,
        vector: Mapping[str, int],
        now_ms: int,
    ) -> Doubt:
        """Return a doubt from now on, which leaves what was not compared and what agreed."""
        kept: dict[str, int] = {}
        for author, last in sorted(vector.items(), key=lambda item: -item[1]):
            if verdicts.volunteers.get(author) == volunteer:
                good = record.last_good(author)
                stays = last if good is None else min(good, last)
                if stays and len(kept) < MAX_KEPT:
                    kept[author] = stays
        return Doubt(since_ms=now_ms, kept=kept)
