"""How much the largest tests try: few examples and cases in `make test`, all in `make test-all`."""

import os
from collections.abc import Sequence
from typing import Any

import pytest

EXHAUSTIVE = os.environ.get("BARNRAISE_TESTS") == "all"


def examples(usual: int, exhaustive: int) -> int:
    """Return the number of examples for this run."""
    return exhaustive if EXHAUSTIVE else usual


def one_in(interval: int, cases: Sequence[Any]) -> list[Any]:
    """Return all cases for `parametrize`; most of them are marked slow.

    Args:
        interval: One case in so many is part of `make test`, beginning with the first.
        cases: Cases that are alike.
    """
    slow = pytest.mark.slow
    return [
        pytest.param(case, marks=slow) if number % interval else case
        for number, case in enumerate(cases)
    ]
