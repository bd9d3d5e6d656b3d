"""Choose the runs that a worker trains: those that a person names, and what comes after them."""

from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated

from barnraise.cli.addresses import RunAddress, run_argument
from barnraise.cli.option_groups import option
from barnraise.cli.site_access import check_trainable, find_run
from barnraise.coordinator_client.client import CoordinatorClient
from barnraise.errors import RunEndedError, StateError
from barnraise.protocol.coordinator_messages import RunSummary, RunView
from barnraise.protocol.enums import RunStatus
from barnraise.state_dir import StateDir
from barnraise.training.local_control import refuse_other_worker

MAX_SHARE = 100
SHARE_EXAMPLE = "like --share 70,30 for two runs"
# Which runs to join, in this order; a draft only if it is launched and waits for its text.
OPEN_STATUSES = (RunStatus.TRAINING, RunStatus.RECRUITING, RunStatus.DRAFT)

RunsArgument = Annotated[
    list[RunAddress],
    run_argument("Each run's address in the browser, its name in that address, or its id."),
]


@dataclass(frozen=True)
class TurnOptions:
    """How a worker divides its time, and what it does when its runs have ended."""

    share: str = option("", "Shares of the time of several runs, in their order, like 70,30.")
    follow_next: bool = option(
        False, "Join the site's next open run when these have ended.", "--next"
    )


@dataclass(frozen=True)
class ChosenRun:
    """A run to train."""

    name: str  # as a person named it
    view: RunView | None = None  # as the site describes it; None while no site answers

    @property
    def id(self) -> str:
        """Return its id, or what stands for it while no site answers."""
        return self.view.id if self.view is not None else self.name

    @property
    def title(self) -> str:
        """Return what people call it."""
        return self.view.name if self.view is not None else self.name

    @property
    def address(self) -> str:
        """Return what commands call it."""
        return (self.view.slug or self.view.id) if self.view is not None else self.name


def parse_shares(text: str, runs: int) -> list[float]:
    """Read the shares of the time of so many runs; all are equal if there is no text. Pure.

    Raises:
        StateError: there are not as many, or one is no number from 1 to 100.
    """
    if not text:
        return [1.0] * runs
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != runs:
        raise StateError(
            f"--share {text} does not have one number for each run (runs named: {runs}), "
            f"{SHARE_EXAMPLE}"
        )
    for part in parts:
        if not (part.isascii() and part.isdecimal() and 1 <= int(part) <= MAX_SHARE):
            raise StateError(
                f"--share {text}: '{part}' is no share from 1 to {MAX_SHARE}; write whole numbers, "
                f"{SHARE_EXAMPLE}"
            )
    return [float(part) for part in parts]


def find_runs(state_dir: StateDir, names: Sequence[str], *, skip_ended: bool) -> list[ChosenRun]:
    """Look the runs up that a person names, before anything that takes time.

    Args:
        state_dir: of this machine.
        names: in addresses, or ids.
        skip_ended: whether runs that have ended are left out, because another one follows.

    Raises:
        CoordinatorError: there is no such run.
        RunEndedError: one has ended.
        StateError: one is named twice, or another worker of this machine trains.
    """
    refuse_other_worker(
        state_dir,
        ". A second worker needs a home of its own (--home FOLDER) and enrols as a machine of its "
        "own",
        only_trainers=True,
    )
    chosen: list[ChosenRun] = []
    for name in names:
        run = ChosenRun(name, find_run(state_dir, name))
        if run.id in [other.id for other in chosen]:
            raise StateError(f"the run '{run.title}' is named twice: name each run once")
        try:
            if run.view is not None:
                check_trainable(run.view)
        except RunEndedError:
            if not skip_ended:
                raise
            continue
        chosen.append(run)
    return chosen


def find_next_run(state_dir: StateDir, done: Collection[str]) -> ChosenRun | None:
    """Find the next open run of this machine's site; None if there is none.

    Raises:
        CoordinatorError: the site does not answer.
    """
    with closing(CoordinatorClient.from_state_dir(state_dir)) as site:
        found = choose_next(fetch_all_runs(site), done)
        return None if found is None else ChosenRun(found.id, site.fetch_run(found.id))


def fetch_all_runs(site: CoordinatorClient) -> list[RunSummary]:
    """Fetch all pages of the list of runs."""
    page = site.fetch_runs(None)
    runs = [*page.runs]
    while page.next is not None:
        page = site.fetch_runs(page.next)
        runs += page.runs
    return runs


def choose_next(runs: Sequence[RunSummary], done: Collection[str]) -> RunSummary | None:
    """Return the run to join next: one that trains before one that waits for machines. Pure."""
    open_runs = [
        run
        for run in runs
        if run.id not in done
        and run.status in OPEN_STATUSES
        and (run.launching or run.status is not RunStatus.DRAFT)
    ]
    return min(open_runs, key=lambda run: OPEN_STATUSES.index(run.status), default=None)
