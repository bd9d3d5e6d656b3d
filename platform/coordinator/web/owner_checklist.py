"""What the owner of a new run has done, and what comes next, with the commands for it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from coordinator.accounts.models import Machine
from coordinator.runs.models import Run

MAX_TO_CONFIRM = 3  # machines with a button, the newest ones


@dataclass(frozen=True)
class ChecklistStep:
    """One step of an owner."""

    title: str  # what to do
    done: bool
    hint: str = ""  # a sentence, or ""
    command: str = ""  # for a terminal, or ""
    to_confirm: tuple[Machine, ...] = ()  # each with a button that confirms it


def list_steps(
    run: Run, site: str, machines: Sequence[Machine], participants: int
) -> list[ChecklistStep]:
    """List an owner's steps from the draft to the first loss; the owner is no participant."""
    address = f"{site}/runs/{run.slug}"
    is_launched = bool(run.spec_text) or run.launch_requested
    join = f"barnraise join {address}"
    text = _text_step(run, address)
    if not machines:
        # The first command enrols the machine as well.
        first_command = text.command or join
        text = replace(text, command="")
        join = ""
    else:
        first_command = ""
    return [
        ChecklistStep(
            "Enrol a machine",
            bool(machines),
            "Install the worker, then run this. It shows a code; approve and confirm it here.",
            first_command,
        ),
        *_confirmation_step(run, machines),
        text,
        ChecklistStep("Launch", is_launched, "The button is above. It fixes the configuration."),
        ChecklistStep(
            "First loss", run.ledger_tokens > 0, "It appears after the first steps.", join
        ),
        ChecklistStep("Other people", participants > 0, _invitation_hint(run)),
    ]


def is_shown(run: Run) -> bool:
    """Return whether the run still needs its owner to set something up."""
    return not run.is_over and run.ledger_tokens == 0


def _confirmation_step(run: Run, machines: Sequence[Machine]) -> list[ChecklistStep]:
    """Return the step that is left where none of the owner's machines may prepare the text."""
    if run.manifest is not None or not machines or any(each.confirmed for each in machines):
        return []
    newest = tuple(machines[:MAX_TO_CONFIRM])
    title = f"Confirm {newest[0].name}" if len(machines) == 1 else "Confirm a machine"
    hint = (
        "The machine that prepares the text signs for you in your runs: it can remove updates and "
        "exclude volunteers. Confirm it only if its terminal shows this key."
    )
    return [ChecklistStep(title, False, hint, to_confirm=newest)]


def _text_step(run: Run, address: str) -> ChecklistStep:
    spec = run.spec
    is_prepared = run.manifest is not None
    title = "Prepare the text"
    if spec.start.model == "folder":
        text = " TEXT" if spec.text.source == "files" else ""
        command = f"barnraise prepare {address}{text} --model FOLDER"
        return ChecklistStep(title, is_prepared, "On the machine that has the model.", command)
    if spec.text.source == "files":
        hint = "On the machine that has the files. It shows what it would read, and asks."
        return ChecklistStep(title, is_prepared, hint, f"barnraise prepare {address} FOLDER")
    return ChecklistStep(
        title, is_prepared, "Your first confirmed machine does this when it joins."
    )


def _invitation_hint(run: Run) -> str:
    if run.access == "invitation":
        return "Create an invitation link further down, and send it."
    if run.access == "team":
        return "The members of the team can join; send them this page's address."
    return (
        "Anyone can join; send them this page's address. While a machine of yours trains, or those "
        "of two people that you invite, harmful updates are withheld."
    )


def count_participants(run: Run) -> int:
    """Count the people other than the owner with a machine in the run."""
    others = run.memberships.exclude(machine__owner=run.owner_id)
    return others.values("machine__owner").distinct().count()


def checklist_context(run: Run, site: str) -> dict[str, Any]:
    """Return what the checklist's template shows to the run's owner."""
    machines = run.owner.machines.filter(revoked=None).order_by("-enrolled")
    steps = list_steps(run, site, machines, count_participants(run))
    first_open = next((step for step in steps if not step.done), None)
    return {"run": run, "steps": steps, "next_step": first_open}
