"""Print by how many bytes two fake cards exceed their plans, and the least share that one uses.

Its own processes load the stub of CUDA before torch, so this module imports torch in no other way.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "worker"), str(ROOT / "tests")]


def main() -> None:
    """Let an engine live on two cards under each plan."""
    # The folder of the tests' helpers is no import path of the type checker.
    from helpers.cuda.card_plans import (  # pyright: ignore[reportMissingImports]
        card_plan,
        live_through,
        on_two_cards,
    )
    from helpers.cuda.cuda_stub import card_process  # pyright: ignore[reportMissingImports]

    from barnraise.planning.memory_model import all_device_bytes

    over, least = 0, 1.0
    with card_process() as process:
        for changes in (dict(clipping="exact"), dict(clipping="layer", boundaries="host")):
            plan = on_two_cards(card_plan(micro_batches=4, **changes))
            life = process.submit(live_through, plan).result()
            for number, planned in enumerate(all_device_bytes(plan)):
                over = max(over, life.peak_of(number) - planned)
                least = min(least, life.peak_of(number) / planned)
    print(json.dumps([over, least]))


if __name__ == "__main__":
    main()
