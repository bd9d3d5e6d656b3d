"""Simulate machines that compare each other's rounds: whom do they suspend, and after how many?

The changes of a round are drawn: a direction that all honest machines share, and noise. What
compares them and what follows from it is the product's own code.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from barnraise.exchange.weights.contribution import ContributionMeter
from barnraise.exchange.weights.opinion_former import OpinionFormer
from barnraise.exchange.weights.weighting import contribution_factors
from barnraise.ledger.codec import encode
from barnraise.ledger.suspension import Statement
from barnraise.ledger.verdict_set import VerdictSet
from barnraise.protocol.enums import Standing
from barnraise.protocol.messages import Update

ELEMENTS = 16_384
SCALE = 5000.0  # units by which a round changes an element
TOKENS = 10_000  # of a round
ROUND_MS = 1000


@dataclass
class _Machine:
    """One honest machine."""

    number: int
    meter: ContributionMeter
    former: OpinionFormer = field(default_factory=OpinionFormer)
    residual: torch.Tensor = field(default_factory=lambda: torch.zeros(ELEMENTS))


class JudgedRounds:
    """A run of invited honest machines, each of a volunteer, and of strangers.

    Attributes:
        rounds: How many rounds it has had.
        verdicts: What the machines have stated.
    """

    def __init__(
        self,
        honest: int = 3,
        strangers: Sequence[float] = (),
        scheme: str = "dense4",
        shared: float = 0.7,
        seed: int = 0,
    ) -> None:
        """Create the machines.

        Args:
            honest: How many honest machines there are.
            strangers: For each stranger, by what it multiplies the mean of the honest changes.
            scheme: How updates are compressed.
            shared: The part of an honest change that all share; its square is their cosine.
            seed: Of all that is drawn.
        """
        self._random = torch.Generator().manual_seed(seed)
        self._machines = [
            _Machine(number, ContributionMeter([ELEMENTS], seed + number))
            for number in range(honest)
        ]
        self._strangers = [*strangers]
        self._scheme = scheme
        self._shared = shared
        self.rounds = 0
        self.verdicts = VerdictSet()

    def add_strangers(self, factors: Sequence[float]) -> None:
        """Let strangers publish from now on: for each, by what it multiplies the honest mean."""
        self._strangers += factors

    def run_round(self) -> set[int]:
        """Let every machine publish a round; return the numbers of the suspended volunteers."""
        self.rounds += 1
        direction = self._noise()
        changes = [self._change(machine, direction) for machine in self._machines]
        mean = torch.stack(changes).float().mean(0)
        changes += [(factor * mean).int() for factor in self._strangers]
        for machine in self._machines:
            self._compare(machine, changes)
        suspended = self.verdicts.suspended
        return {number for number in range(len(changes)) if _pseudonym(number) in suspended}

    def _noise(self) -> torch.Tensor:
        return SCALE * torch.randn(ELEMENTS, generator=self._random)

    def _change(self, machine: _Machine, direction: torch.Tensor) -> torch.Tensor:
        """Return what a machine publishes; the rest stays with it, as the codec leaves it."""
        noise_share = (1 - self._shared**2) ** 0.5
        wanted = machine.residual + self._shared * direction + noise_share * self._noise()
        _, sent = encode(wanted.int(), self._scheme)
        machine.residual = wanted - sent
        return sent

    def _compare(self, machine: _Machine, changes: Sequence[torch.Tensor]) -> None:
        """Let a machine publish its round and receive the others', then state what it thinks."""
        machine.meter.record_own_part(0, changes[machine.number])
        machine.meter.record_own_tokens(TOKENS, 1.0)
        agreements = machine.meter.agreements()
        factors = contribution_factors(agreements, self.verdicts.vouched or ())
        doubted = [volunteer for volunteer, factor in factors.items() if not factor]
        machine.former.record_round(agreements, doubted)
        machine.former.record_harm(agreements, doubted)
        self._state(machine)
        for number, change in enumerate(changes):
            if number != machine.number and _pseudonym(number) not in self.verdicts.suspended:
                sample = machine.meter.sample(0, change)
                machine.meter.record_update(_pseudonym(number), [sample], TOKENS)
                machine.former.record_update(
                    Update.model_construct(
                        peer=_pseudonym(number),
                        incarnation="0" * 16,
                        seq=self.rounds,
                        volunteer=_pseudonym(number),
                    )
                )

    def _state(self, machine: _Machine) -> None:
        key = _pseudonym(machine.number)
        now_ms = ROUND_MS * self.rounds
        opinions = machine.former.form(key, self.verdicts, {}, now_ms)
        if opinions is not None:
            statement = Statement(
                key,
                Standing.INVITED,
                now_ms,
                opinions.doubted,
                frozenset(opinions.agreeing),
                frozenset(opinions.attested),
            )
            statements = {**self.verdicts.statements, key: statement}
            self.verdicts = VerdictSet(statements=statements)


def _pseudonym(number: int) -> str:
    return f"{number:064x}"


def count_honest_suspended(rounds: int, scheme: str, shared: float) -> int:
    """Return in how many of so many rounds of honest machines one of them is suspended."""
    run = JudgedRounds(scheme=scheme, shared=shared)
    return sum(bool(run.run_round()) for _ in range(rounds))
