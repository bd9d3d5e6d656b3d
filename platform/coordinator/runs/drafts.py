"""A draft of a run: what its owner may write in it, and the address that follows from its name."""

import dataclasses
from typing import Any
from uuid import UUID

from barnraise.spec import RunSpec, problems
from coordinator.lib.slugs import slug_of
from coordinator.runs.join_policy import OPEN_TO_ALL, JoinPolicy
from coordinator.runs.querysets import ID, RunQuerySet

# /runs/new/ and the like are pages, and "run" says nothing about one.
RESERVED_SLUGS = ("new", "estimate", "compare", "run")


@dataclasses.dataclass(frozen=True)
class NewRun:
    """Describe a run that is to be created."""

    name: str
    spec: RunSpec
    report_every: float = 5.0  # seconds between a machine's reports
    quorum: int = 1  # machines that must be alive before training starts
    join_policy: JoinPolicy = OPEN_TO_ALL
    parent: Any = None  # the `Run` that this one is a copy of

    def problems(self) -> dict[str, str]:
        """Return a sentence for each field that is not valid."""
        name = clean_name(self.name)
        return (
            draft_problems(name, self.spec, self.report_every, self.quorum)
            | self.join_policy.problems()
        )

    def to_columns(self) -> dict[str, Any]:
        """Return the values of the columns of `Run`."""
        return {
            "parent": self.parent,
            "name": clean_name(self.name),
            "draft": dataclasses.asdict(self.spec),
            "report_every": self.report_every,
            "quorum": self.quorum,
            **self.join_policy.to_columns(),
        }


def clean_name(name: str) -> str:
    """Remove characters that are invisible or reverse the direction of the text."""
    return " ".join("".join(c if c.isprintable() else " " for c in name).split())


def choose_slug(name: str, pk: UUID, runs: RunQuerySet) -> str:
    """Return the address of a run of this name, or a longer one if it is taken.

    A name without a letter or digit makes none: the run's id is its address.
    """
    slug = slug_of(name)
    if not slug:
        return str(pk)
    others = runs.filter(slug=slug).exclude(pk=pk)
    is_taken = slug in RESERVED_SLUGS or ID.fullmatch(slug) or others.exists()
    return unique_slug(name, pk) if is_taken else slug


def unique_slug(name: str, pk: UUID) -> str:
    """Return an address that no other run has."""
    return f"{slug_of(name)}-{pk.hex[-8:]}"


def start_problems(before: RunSpec, spec: RunSpec) -> dict[str, str]:
    """Return a sentence for each field that a warm-started run must keep and does not."""
    if not spec.start.run:
        return {}
    reason = "this run begins with another's weights"
    field_problems = {
        f"model.{name}": f"must stay {value:,}: {reason}"
        for name, value in dataclasses.asdict(before.model).items()
        if getattr(spec.model, name) != value
    }
    if before.text.tokenizer != spec.text.tokenizer:
        field_problems["text.tokenizer"] = f"must stay {before.text.tokenizer}: {reason}"
    return field_problems


def draft_problems(name: str, spec: RunSpec, report_every: float, quorum: int) -> dict[str, str]:
    """Return a sentence for each field of a draft that is not valid."""
    field_problems = problems(spec)
    if not 1 <= len(name) <= 80:
        field_problems["name"] = "give the run a name of 1 to 80 characters"
    if not 0.2 <= report_every <= 3600:
        field_problems["report_every"] = (
            "the seconds between two reports must be between 0.2 and 3,600"
        )
    if not 1 <= quorum <= 10_000:
        field_problems["quorum"] = "the machines to wait for must be between 1 and 10,000"
    return field_problems
