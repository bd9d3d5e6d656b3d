"""Print by how many bytes two fake cards exceed their plans, and the least share that one uses.

Its own processes load the stub of CUDA before torch, so this module imports torch in no other way.
"""

import json
from typing import Any


def main() -> None:
    """Let an engine live on two cards under each plan."""
    # The folder of the tests' helpers is no import path of the type checker.
    from helpers.cuda import card_plans, cuda_stub  # pyright: ignore[reportMissingImports]

    from barnraise.planning.memory_model import all_device_bytes

    over, least = 0, 1.0
    cases: list[dict[str, Any]]
    cases = [{"clipping": "exact"}, {"clipping": "layer", "boundaries": "host"}]
    with cuda_stub.card_process() as process:
        for changes in cases:
            plan = card_plans.on_two_cards(card_plans.card_plan(micro_batches=4, **changes))
            life = process.submit(card_plans.live_through, plan).result()
            for number, planned in enumerate(all_device_bytes(plan)):
                over = max(over, life.peak_of(number) - planned)
                least = min(least, life.peak_of(number) / planned)
    print(json.dumps([over, least]))


if __name__ == "__main__":
    main()
