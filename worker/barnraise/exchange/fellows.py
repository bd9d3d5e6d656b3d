"""The others as one machine sees them: how fast they train, what of theirs is under way, and when a round ends with
theirs. No I/O.

Links are bounded: who trains beyond them shows in the ledger, by its pace.
"""

from collections.abc import Mapping
from typing import Protocol

from barnraise.exchange.gossip import Linked
from barnraise.exchange.guess import Absent, momenta
from barnraise.exchange.pace import Fellow, Pace, weight
from barnraise.exchange.rhythm import Rhythm, agreed, together
from barnraise.spec import RunSpec
from barnraise.wire import Update


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
        self._handed: dict[str, int] = {}  # author → its last update that the loop has
        self._guess: tuple[dict[str, int], float] = ({}, 0.0)  # updates under way by author, and what follows
        self._said, self._said_at = 0, 0.0  # tokens of our last update; when it was, by the shared clock
        self._in_turns = False

    def begin(self, vector: Mapping[str, int]) -> None:
        """The loop has these updates."""
        self._handed = dict(vector)

    def arrived(self, update: Update, now: float) -> None:
        """The loop gets an update."""
        self._paces.setdefault(update.peer, Pace()).note(now, update.tokens)
        self._handed[update.author] = update.seq

    def said(self, tokens: int, clock: float) -> None:
        """The loop publishes an update of so many. `clock`: seconds since 1970."""
        self._said, self._said_at = tokens, clock

    def weight(self, rate: float, now: float) -> float:
        """This machine's share, at `rate` tokens/s, of all the training that goes on; 1 when alone."""
        return weight(rate, self._training(now), now)

    def guess(self, author: str, rate: float, now: float) -> float:
        """In this author's momenta: what is announced and has not come, for who trains at `rate` tokens/s. The same
        while the same is missing: a figure that moved with every rate would move the replica at every step. Nothing
        where rounds are said in turns: what is under way is little, and of which fragments is not known."""
        if not self._recipe.speculation or self._in_turns:
            return 0.0
        missing = self._missing(author, now)
        if missing != self._guess[0]:
            links, absent = dict(self._circle.links), []
            for each, count in missing.items():
                key = each.partition(".")[0]
                absent.append(Absent(count, self._paces[key].last, self._rate(key, links, now)))
            self._guess = missing, momenta(self._recipe, absent, self._said, rate)
        return self._guess[1]

    def rhythm(self, rate: float, line: float, now: float, clock: float, turns: bool = True) -> Rhythm:
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
        self._in_turns = window.turns is not None
        return window

    # ---- what is known of them

    def _training(self, now: float) -> list[Fellow]:
        """Who trains too, linked to us or not."""
        links = dict(self._circle.links)
        near = [Fellow(self._rate(key, links, now), link.since) for key, link in links.items() if not link.complete]
        further = [pace.unseen(now) for key, pace in self._paces.items() if key not in links]
        return near + [Fellow(rate, now) for rate in further if rate]

    def _missing(self, author: str, now: float) -> dict[str, int]:
        """Author → updates that some linked peer has and the loop has not, of those whose pace is known."""
        links, found = dict(self._circle.links), {}
        for each, seq in self._handed.items():
            pace = self._paces.get(each.partition(".")[0])
            if each != author and pace is not None and not pace.overdue(now):
                count = max((link.vector.get(each, 0) for link in links.values()), default=0) - seq
                if count > 0:
                    found[each] = count
        return found

    def _rate(self, key: str, links: Mapping[str, Linked], now: float) -> float:
        pace = self._paces.get(key, Pace())
        return pace.rate(links[key].rate) if key in links else pace.unseen(now)
