"""The aggregate type "score", by run, machine's key and tokens: how many tasks were answered."""

from collections.abc import Sequence
from datetime import datetime

from pydantic import AwareDatetime, Field

from barnraise.protocol.evaluation import MAX_TASK_TEXT
from barnraise.protocol.types import Digest, Message
from coordinator.accounts.models import Machine
from coordinator.eventlog.registry import AggregateType, Fact, State, require_row
from coordinator.runs.models import Run
from coordinator.telemetry.task_scores import RecordedScore


class ScoreRecorded(Message):
    """A machine answered the tasks whose text has the digest `tasks`."""

    tasks: Digest
    correct: int = Field(ge=0, le=MAX_TASK_TEXT)
    count: int = Field(ge=1, le=MAX_TASK_TEXT)
    at: AwareDatetime


def fold(facts: Sequence[Fact]) -> State | None:
    """Return the last score of these weights by this machine. Pure."""
    return facts[-1].payload.model_dump(mode="json")


def store(name: str, state: State | None) -> None:
    """Write the row of a score, once its run and its machine are here."""
    if state is None:
        return
    run_id, key, tokens = name.split(":")
    require_row(Run.objects.filter(pk=run_id), f"run:{run_id}")
    machine = require_row(Machine.objects.filter(key=key), f"machine:{key}")
    values = {**state, "at": datetime.fromisoformat(state["at"])}
    RecordedScore.objects.update_or_create(
        run_id=run_id, machine=machine, tokens=int(tokens), defaults=values
    )


AGGREGATE_TYPE = AggregateType("score", {"record": ScoreRecorded}, fold, store)
