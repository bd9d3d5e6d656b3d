"""Take of a GPU's memory what a plan needs, and no more."""

from barnraise.errors import MemoryShortageError
from barnraise.formats import format_bytes
from barnraise.planning.budgets import device_allowance
from barnraise.planning.mixing_memory import mean_gradient_bytes
from barnraise.planning.plan import Plan
from barnraise.spec import Recipe
from barnraise.swap.device import free_memory, limit_memory, total_memory


def claim_card_memory(plan: Plan, recipe: Recipe) -> None:
    """Check that a plan fits what is free on its GPU now, and bind torch to what it takes of that.

    Without a bound, what exceeds the card goes where the driver pages, ten times as slowly and
    without an error; other programs on the card, a desktop's windows, would go there as well.

    Raises:
        MemoryShortageError: other programs have taken memory since the plan was made.
    """
    sizes = plan.card_bytes or (plan.device_bytes,)
    for each, used in zip(plan.device_plans, sizes, strict=True):
        if not total_memory(each.device):
            continue
        if recipe.mixes_weights and each is plan.device_plans[0]:
            used += mean_gradient_bytes(plan.model, recipe)
        free = free_memory(each.device)
        if free < used:
            raise MemoryShortageError(
                f"the GPU {each.device} has {format_bytes(free)} of memory free, and the plan "
                f"takes {format_bytes(used)}: another program has taken memory since the plan was "
                "made",
                device=True,
            )
        limit_memory(each.device, min(free, device_allowance(used)))
