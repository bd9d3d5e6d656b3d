"""A crew that is complete, and the same crew with one block moved. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from barnraise.planning.crew import CrewMachine, CrewPlan, PipelineShape
from barnraise.planning.crew_balance import BlockMove, find_move, lay_deal
from barnraise.training.crew.crew_code import CrewCode
from barnraise.training.crew.forming_messages import Seating


@dataclass(frozen=True)
class FormedCrew:
    """A crew that is complete.

    Attributes:
        code: with which machines join it.
        plan: who holds what, and what each machine's spans cost.
        seating: the same for its machines.
    """

    code: CrewCode
    plan: CrewPlan
    seating: Seating

    @property
    def _members(self) -> list[CrewMachine]:
        """Return the machines in the order of their seats."""
        return [self.plan.machines[stage.machine] for stage in self.plan.deal.stages]

    @property
    def _shape(self) -> PipelineShape:
        deal = self.plan.deal
        return PipelineShape(
            self.plan.task.model, deal.sequences, deal.micro_batches, deal.boundary_bits
        )

    def find_move(self, step_seconds: Sequence[Mapping[int, float]]) -> BlockMove | None:
        """Find the move of one block that the last round's steps suggest; see `crew_balance.py`.

        `step_seconds` are those of each machine's own work, by its seat's number, for each step.
        Blocks whose span has several holders stay: these balance themselves.
        """
        deal = self.plan.deal
        if not step_seconds or len(deal.spans) < len(deal.stages):
            return None
        numbers = range(len(self.seating.seats))
        measured = [fmean(seconds[number] for seconds in step_seconds) for number in numbers]
        return find_move(deal, self._members, self._shape, measured)

    def move_block(self, move: BlockMove) -> "FormedCrew":
        """Return the crew with one block moved over one boundary."""
        counts = [seat.blocks for seat in self.seating.seats]
        counts[move.giver] -= 1
        counts[move.receiver] += 1
        members = self._members
        deal = lay_deal(members, self._shape, counts)
        assert deal is not None, "a move was priced"
        seats = [
            seat.model_copy(update={"first_block": stage.first_block, "blocks": stage.blocks})
            for seat, stage in zip(self.seating.seats, deal.stages, strict=True)
        ]
        changes = {"epoch": self.seating.epoch + 1, "seats": seats}
        plan = CrewPlan(self.plan.task, tuple(members), deal)
        return FormedCrew(self.code, plan, self.seating.model_copy(update=changes))
