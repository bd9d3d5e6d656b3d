"""A run's life, decided purely: what it is now, what is known, and what it becomes.

DRAFT       the owner edits it. Leaves when the owner has launched it *and* a worker has posted the text's manifest.
RECRUITING  the spec is fixed; waits until `quorum` machines are alive.
TRAINING    workers train. The owner may pause; leaves by itself when the budget is spent and the model is safe.
PAUSED      workers keep their state and take no steps, until the owner resumes.
FINISHED    the budget is spent and the final checkpoint is whole on enough machines (or an admin said so).
CANCELLED   the owner gave it up.

    draft → recruiting → training ⇄ paused
                              training → finished       any but the last two → cancelled
"""

from dataclasses import dataclass

from barnraise.protocol.enums import RunStatus

CONTROLS: dict[str, tuple[frozenset[RunStatus], RunStatus]] = {
    "pause": (frozenset({RunStatus.TRAINING}), RunStatus.PAUSED),
    "resume": (frozenset({RunStatus.PAUSED}), RunStatus.TRAINING),
    "cancel": (
        frozenset({RunStatus.DRAFT, RunStatus.RECRUITING, RunStatus.TRAINING, RunStatus.PAUSED}),
        RunStatus.CANCELLED,
    ),
    "finish": (
        frozenset({RunStatus.RECRUITING, RunStatus.TRAINING, RunStatus.PAUSED}),
        RunStatus.FINISHED,
    ),
}  # what a person may do: from which statuses, to which
OTHER_PEOPLE = 2  # of whom each must hold the final checkpoint, where the run ever had so many


@dataclass(frozen=True)
class Facts:
    """What the site knows of a run. People are counted by account; `safe` means: holds the final checkpoint whole."""

    launch_requested: bool = False
    manifest: bool = False
    quorum: int = 1
    alive: int = 0  # machines
    ledger_tokens: int = 0
    token_budget: int = 1
    owner_safe: bool = False
    others_safe: int = 0  # people other than the owner
    others_ever: int = 0  # …who ever contributed


def tick(status: RunStatus, facts: Facts) -> RunStatus:
    """The status that follows: at most one step, and the same one for the same arguments."""
    if status is RunStatus.DRAFT and facts.launch_requested and facts.manifest:
        return RunStatus.RECRUITING
    if status is RunStatus.RECRUITING and facts.alive >= max(1, facts.quorum):
        return RunStatus.TRAINING
    if (
        status is RunStatus.TRAINING
        and facts.ledger_tokens >= facts.token_budget
        and not missing(facts)
    ):
        return RunStatus.FINISHED
    return status


def missing(facts: Facts) -> str:
    """Who must still confirm the final checkpoint, as a sentence; "" when nobody must."""
    others = min(OTHER_PEOPLE, facts.others_ever) - facts.others_safe
    wanted = [] if facts.owner_safe else ["the owner's machine"]
    if others > 0:
        wanted.append(
            "a machine of one other person" if others == 1 else f"machines of {others} other people"
        )
    return (
        f"The final model is not safe yet: waiting for {' and '.join(wanted)} to confirm it."
        if wanted
        else ""
    )


def waiting(status: RunStatus, facts: Facts) -> str:
    """What the run waits for, as a sentence for its page; "" when for nothing."""
    if status is RunStatus.DRAFT and facts.launch_requested:
        return "Waiting for one of the owner's machines to prepare the text."
    if status is RunStatus.RECRUITING:
        return f"Waiting for machines: {facts.alive} of {max(1, facts.quorum)} are here."
    if status is RunStatus.TRAINING and facts.ledger_tokens >= facts.token_budget:
        return missing(facts)
    if status is RunStatus.TRAINING and not facts.alive:
        return "No machine is reporting. Those that hold a ticket go on by themselves and will report again."
    return ""
