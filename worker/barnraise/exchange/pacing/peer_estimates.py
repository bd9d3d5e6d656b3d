"""The others as one machine sees them: how fast they train, what of theirs is under way, and when a round ends with
theirs. No I/O.

Links are bounded: who trains beyond them shows in the ledger, by its pace.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

from barnraise.exchange.gossip.gossip import Linked
from barnraise.exchange.pacing.delay_compensation import Absent, larger, momenta
from barnraise.exchange.pacing.round_schedule import Rhythm, agreed, together
from barnraise.exchange.pacing.weighting import Fellow, Pace, weight
from barnraise.protocol.messages import Update
from barnraise.spec import RunSpec


class Circle(Protocol):
    links: Mapping[str, Linked]  # by key; another thread changes them


class Fellows:
    def __init__(self, spec: RunSpec, circle: Circle):
        self._recipe, self._parameters = spec.recipe, spec.model.parameters
        self._sizes = tuple(fragment.size for fragment in spec.model.fragments())
        self._step_tokens = spec.recipe.step_sequences * spec.model.context
        self._most = max(1, spec.max_tokens_per_update // self._step_tokens)
        self._circle = circle
        self._paces: dict[str, Pace] = {}  # by peer
        self._absent: dict[tuple[str, int], Absent] = {}  # what is under way, by author and seq
        self._said = [0] * len(self._sizes)  # tokens of our last update that said each fragment
        self._said_at = 0.0  # when our last was said, by the shared clock

    def arrived(self, update: Update, now: float) -> None:
        """The loop gets an update."""
        self._paces.setdefault(update.peer, Pace()).note(now, update.tokens)

    def said(self, update: Update, clock: float) -> None:
        """The loop publishes an update. `clock`: seconds since 1970."""
        self._said = [
            update.tokens if part.size else was
            for part, was in zip(update.fragments, self._said, strict=True)
        ]
        self._said_at = clock

    def weight(self, rate: float, now: float) -> float:
        """This machine's share, at `rate` tokens/s, of all the training that goes on; 1 when alone."""
        return weight(rate, self._training(now), now)

    def guess(self, under_way: Iterable[Update], rate: float, now: float) -> tuple[float, ...]:
        """Of each fragment, in the momenta of this machine, which trains at `rate` tokens/s: what these updates, whose
        headers alone have come, will say of it. Nothing of an author whose pace is unknown, or who is long overdue. An
        update counts the same until it comes: what moved with every rate would move the replica at every step."""
        known, self._absent = self._absent, {}
        if self._recipe.speculation:
            for update in sorted(under_way, key=lambda update: update.seq):
                pace = self._paces.get(update.peer)
                if pace is not None and not pace.overdue(now):
                    identity = update.author, update.seq
                    self._absent[identity] = known.get(identity) or self._lacking(update, rate, now)
        return momenta(self._recipe, self._absent.values(), len(self._sizes))

    def rhythm(
        self, rate: float, line: float, now: float, clock: float, turns: bool = True
    ) -> Rhythm:
        """The next round at `rate` tokens/s over a line of so many bytes/s: as the recipe says or the line allows and,
        unless nobody else trains, in the window that the others have. `clock`: seconds since 1970. `turns`: whether it
        may be said in turns, where the recipe wants it."""
        pushes = sum(link.eager for link in dict(self._circle.links).values())
        seconds = self._step_tokens / rate if rate else None
        alone = agreed(self._recipe, self._parameters, line, seconds, max(1, pushes), self._most)
        rates = [fellow.rate for fellow in self._training(now) if fellow.rate]
        if not rates or seconds is None or self._recipe.strategy == "async":
            return alone
        mean = self._step_tokens * (1 + len(rates)) / (rate + sum(rates))
        window = together(self._recipe, alone, seconds, mean, clock, self._most)
        if turns and self._recipe.strategy == "streams":
            window = window.streamed(self._sizes, self._said_at, clock)
        return window

    # ---- what is known of them

    def _training(self, now: float) -> list[Fellow]:
        """Who trains too, linked to us or not."""
        links = dict(self._circle.links)
        near = [
            Fellow(self._rate(key, links, now), link.since)
            for key, link in links.items()
            if not link.complete
        ]
        further = [pace.unseen(now) for key, pace in self._paces.items() if key not in links]
        return near + [Fellow(rate, now) for rate in further if rate]

    def _lacking(self, update: Update, rate: float, now: float) -> Absent:
        theirs = self._rate(update.peer, dict(self._circle.links), now)
        said = [part.size > 0 for part in update.fragments]
        return Absent(
            update.author, all(said), larger(said, update.tokens, theirs, self._said, rate)
        )

    def _rate(self, key: str, links: Mapping[str, Linked], now: float) -> float:
        pace = self._paces.get(key, Pace())
        return pace.rate(links[key].rate) if key in links else pace.unseen(now)
