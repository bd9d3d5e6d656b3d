"""The status file of a run's folder: what the worker writes for people and programs on its machine.

It is read while the worker replaces it, after the worker has ended, and by newer versions.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator

from barnraise.exchange.stats import ChecksumView, NeighbourView
from barnraise.protocol.reports import NO_FIGURES, MachineFigures

STATUS_FILE = "status.json"


class LocalStatus(MachineFigures):
    """A report's figures, and what concerns this machine alone.

    Every field has a default, because older versions wrote fewer of them.
    """

    at: float = 0.0  # when it was written, in seconds since 1970
    run: str = ""
    name: str = ""
    device: str = ""
    token_budget: int = 0
    coordinator_bytes: int = 0
    reason: str = ""  # why the worker waits; "" while it does not
    warning: str = ""  # what is wrong while it trains all the same
    memory_shortages: int = 0  # how often it had to plan with less memory
    refused: str | None = None  # why it has no place in the run any longer
    # Why it takes no snapshot although it needs one, or why its updates do not count yet.
    waiting: str | None = None
    reach: str = ""  # how peers reach the machine, in a sentence
    reach_facts: dict[str, Any] = {}
    run_rate: float | None = None  # tokens/s of all machines
    loss: float | None = None  # of the last step, in nats a token
    losses: tuple[float, ...] = ()
    validation_first: tuple[int, float] | None = None  # (ledger tokens, loss)
    validation_last: tuple[int, float] | None = None
    neighbours: tuple[NeighbourView, ...] = ()
    checksum: ChecksumView = ChecksumView()

    @model_validator(mode="before")
    @classmethod
    def add_missing_figures(cls, written: Any) -> Any:
        """Add the figures that an older version did not write."""
        return {**dict(NO_FIGURES), **written} if isinstance(written, Mapping) else written


def read_status(folder: Path) -> LocalStatus | None:
    """Read the status file in a run's folder; None if there is none, or a crash cut it off."""
    try:
        return LocalStatus.model_validate_json((folder / STATUS_FILE).read_bytes())
    except (OSError, ValidationError):
        return None
