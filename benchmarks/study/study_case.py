"""One training of the study: its settings, and the key under which its result is stored."""

import json
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Case:
    """The settings of one training.

    The defaults of "ours" are those of a new run on a line that is full, but without predictions of
    updates in flight. Kinds:

    * ours: this project's exchange.
    * diloco: synchronous, fp32, H steps a round (Douillard et al. 2023).
    * parallel: one gradient of all replicas' text each step.
    * alone: one replica with one replica's share of the tokens.

    The other kinds use only some of the settings.
    """

    kind: str = "ours"
    tokens: int = 1_024_000  # of all replicas together
    seed: int = 0
    replicas: int = 4
    rate: float = 2e-3  # the inner optimizer's learning rate
    optimizer: str = "adamw"  # or "muon"
    matrix_rate: float | None = None  # Muon's, of the matrices; None: 2.5 times the rate
    beta2: float = 0.95  # AdamW's
    weight_decay: float = 0.1
    steps: int = 10  # H: steps a round of a machine of average speed
    form: str = "dense2"  # the compression scheme
    decay: float = 1.0  # β of the error feedback
    # Whether a replica begins with its machine's residual. A worker's does after short rounds
    # whose updates hold only a few of their values ("top…" forms).
    residual_in_replica: bool = False
    outer_rate: float = 0.6  # η
    momentum: float = 0.7  # μ at the start of the training
    momentum_end: float | None = None  # μ at its end; None: as at the start
    plain_rounds: int = 0  # rounds of each machine from its start on that have no momentum
    delay: float = 0.8  # rounds that an update is in flight, ± a quarter
    windows: bool = True  # Rounds end together, by the clock.
    streamed: bool = True  # Fragments are published one after another, not all at the round's end.
    # What predicts an update in flight: "own" (this machine's last update), "last" (the author's
    # last update), "momentum" (this machine's momentum) or "none".
    guess: str = "none"
    trust: float = 1.0  # the factor of a prediction
    fold: str = "now"  # A late update moves the replica at once, or only with the next "round".
    weights: str = "rate"  # of an update: by its author's tokens per second, or "even"
    # The schedule's tokens: "expected" adds those in flight to the ledger's; or only the "ledger".
    clock: str = "expected"
    speeds: tuple[float, ...] = ()  # of the replicas, in any unit; empty: all the same
    joins: tuple[float, ...] = ()  # when replicas join, 0…1 of the training; empty: at its start

    @property
    def key(self) -> str:
        """The key under which the result is stored."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "Case":
        """Read the case of a result.

        Raises:
            TypeError: if it is a case of another version.
        """
        settings: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in raw.items()
        }
        return cls(**settings)

    def __str__(self) -> str:
        """Return the settings that differ from the defaults."""
        changes = [
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return ", ".join(changes) or "the defaults"
