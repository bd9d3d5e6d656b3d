"""A run's lifecycle. Pure: the present status and what is known decide the next status.

DRAFT       The owner edits it. It ends when the owner has launched the run *and* a worker has
            posted the manifest of the text.
RECRUITING  The spec is fixed. The run waits until `quorum` machines are alive.
TRAINING    Workers train. The owner may pause. It ends by itself when the budget is spent and the
            final checkpoint is safe.
PAUSED      Workers keep their state and take no steps, until the owner resumes.
FINISHED    The budget is spent and enough machines hold the whole final checkpoint, or a person
            finished the run.
CANCELLED   The owner gave the run up.

    draft → recruiting → training ⇄ paused
                              training → finished       any but the last two → cancelled
"""

from dataclasses import dataclass

from barnraise.protocol.enums import RunStatus

# What a person may do: action → (from which statuses, to which).
TRANSITIONS: dict[str, tuple[frozenset[RunStatus], RunStatus]] = {
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
}
OTHER_PEOPLE = 2  # so many others must hold the final checkpoint, if the run ever had as many


@dataclass(frozen=True)
class LifecycleFacts:
    """What the site knows of a run."""

    launch_requested: bool = False  # by the owner
    manifest: bool = False  # a worker has posted it
    unconfirmed: bool = False  # only unconfirmed machines of the owner could prepare the text
    quorum: int = 1  # machines that must be alive before training starts
    alive: int = 0  # machines that are alive
    ledger_tokens: int = 0  # tokens trained so far
    token_budget: int = 1  # tokens to train
    owner_safe: bool = False  # a machine of the owner holds the whole final checkpoint
    others_safe: int = 0  # how many other people have a machine that holds it
    others_ever: int = 0  # how many other people ever contributed


def next_status(status: RunStatus, facts: LifecycleFacts) -> RunStatus:
    """Return the status that follows, at most one step on."""
    if status is RunStatus.DRAFT and facts.launch_requested and facts.manifest:
        return RunStatus.RECRUITING
    if status is RunStatus.RECRUITING and facts.alive >= max(1, facts.quorum):
        return RunStatus.TRAINING
    is_spent = facts.ledger_tokens >= facts.token_budget
    if status is RunStatus.TRAINING and is_spent and not missing_confirmations(facts):
        return RunStatus.FINISHED
    return status


def missing_confirmations(facts: LifecycleFacts) -> str:
    """Return a sentence on who must still confirm the final checkpoint; "" if nobody must."""
    missing = [] if facts.owner_safe else ["the owner's machine"]
    others = min(OTHER_PEOPLE, facts.others_ever) - facts.others_safe
    if others == 1:
        missing.append("a machine of one other person")
    elif others > 1:
        missing.append(f"machines of {others} other people")
    if not missing:
        return ""
    machines = " and ".join(missing)
    return f"The final model is not safe yet: waiting for {machines} to confirm it."


def waiting_reason(status: RunStatus, facts: LifecycleFacts) -> str:
    """Return a sentence on what the run waits for; "" if for nothing."""
    if status is RunStatus.DRAFT and facts.launch_requested and facts.unconfirmed:
        return "Waiting for the owner to confirm the machine that prepares the text."
    if status is RunStatus.DRAFT and facts.launch_requested:
        return "Waiting for one of the owner's machines to prepare the text."
    if status is RunStatus.RECRUITING:
        return f"Waiting for machines: {facts.alive} of {max(1, facts.quorum)} are here."
    if status is RunStatus.TRAINING and facts.ledger_tokens >= facts.token_budget:
        return missing_confirmations(facts)
    if status is RunStatus.TRAINING and not facts.alive:
        return (
            "No machine is reporting. "
            "Machines keep training on their own and will report when they can."
        )
    return ""
