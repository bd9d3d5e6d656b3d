"""How many examples the largest property tests try: few in `make test`, all in `make test-all`."""

import os

EXHAUSTIVE = os.environ.get("BARNRAISE_TESTS") == "all"


def examples(usual: int, exhaustive: int) -> int:
    """Return the number of examples for this run."""
    return exhaustive if EXHAUSTIVE else usual
