"""Price a crew's spans on one machine with the machine's own planner. Pure."""

from dataclasses import dataclass, field

from barnraise.errors import PlanError
from barnraise.planning.crew import CrewMachine, SpanPrice, SpanRequest
from barnraise.planning.lines import Line
from barnraise.planning.plan import PipelineStage, Plan
from barnraise.planning.search import make_stage_plan
from barnraise.planning.write_advice import PlanRequest


@dataclass(frozen=True)
class StagePricer:
    """Price spans on one machine; each is planned once.

    Attributes:
        request: the machine, its owner's limits, the model and the recipe's optimizer.
    """

    request: PlanRequest
    _prices: dict[SpanRequest, SpanPrice | None] = field(default_factory=dict)

    def __call__(self, span: SpanRequest) -> SpanPrice | None:
        """Return what a span costs; None if it does not fit."""
        if span not in self._prices:
            self._prices[span] = self._price(span)
        return self._prices[span]

    def _price(self, span: SpanRequest) -> SpanPrice | None:
        task = self.request
        blocks = range(1, span.blocks + 1)
        ends = (0, task.model.layers + 1) if span.has_ends else ()
        stage = PipelineStage(tuple(sorted((*blocks, *ends))), span.sequences)
        sequences = span.sequences * span.micro_batches
        try:
            plan = make_stage_plan(
                task.hardware, task.model, stage, task.limits, sequences, task.optimizer
            )
        except PlanError:
            return None
        return _price_plan(plan)


def describe_machine(name: str, line: Line, request: PlanRequest) -> CrewMachine:
    """Return a machine for `plan_crew`, priced by its own planner.

    Args:
        name: as people read it.
        line: between it and the others.
        request: the machine, its owner's limits, and what it would train.
    """
    try:
        alone = _price_plan(request.make_plan())
    except PlanError:
        alone = None
    return CrewMachine(name, line, StagePricer(request), alone)


def _price_plan(plan: Plan) -> SpanPrice:
    return SpanPrice(
        step_seconds=plan.step_seconds,
        groups=len(plan.forward_groups),
        bottleneck=plan.bottleneck,
        host_bytes=plan.host_bytes,
        device_bytes=plan.all_device_bytes,
        disk_bytes=plan.disk_bytes,
    )
