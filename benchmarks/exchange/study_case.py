"""One training that the study makes: what it is made of, and the name under which its result is kept."""

import json
from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True)
class Case:
    """Of ours, what is not said is as a new run has it on a line that is full, but for the guess. `kind`: ours; diloco
    (synchronous, fp32, H steps a round: Douillard et al. 2023); parallel (one gradient of all replicas' text a step);
    alone (one replica with one replica's share of the tokens). Of the others only what a kind uses is looked at."""

    kind: str = "ours"
    tokens: int = 1_024_000  # of all replicas together
    seed: int = 0
    replicas: int = 4
    rate: float = 2e-3  # of the inner optimizer
    optimizer: str = "adamw"  # or muon
    steps: int = 10  # H, of a machine of average speed
    form: str = "dense2"
    decay: float = 1.0  # β of the error feedback
    outer_rate: float = 0.6  # η
    momentum: float = 0.7  # μ at the start…
    momentum_end: float | None = None  # …and at the end, when that is another
    delay: float = 0.8  # rounds that an update is under way, ± a quarter
    windows: bool = True  # rounds end together by the clock
    streamed: bool = True  # each fragment's round ends when the line comes to it, not all at once
    guess: str = (
        "none"  # of an update under way: by one's own, the peer's last, one's own momentum, or none
    )
    trust: float = 1.0  # what a guess is multiplied by
    fold: str = "now"  # a late update moves the replica when it comes, or only with the next round
    weights: str = "rate"  # of an update: by its author's share of the tokens a second, or even
    clock: str = "expected"  # the schedule's tokens: the ledger's with what is thought under way, or as it stands
    speeds: tuple[float, ...] = ()  # of the replicas, any unit; all alike when empty
    joins: tuple[
        float, ...
    ] = ()  # when each replica begins, of the whole training; at once when empty

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def read(cls, raw: dict) -> "Case":
        """From a result's line. Raises TypeError for one of another version."""
        return cls(
            **{
                name: tuple(value) if isinstance(value, list) else value
                for name, value in raw.items()
            }
        )

    def __str__(self) -> str:
        """What differs from the plainest case of its kind."""
        changed = [
            f"{f.name}={getattr(self, f.name)}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        ]
        return ", ".join(changed) or "ours as it is"
