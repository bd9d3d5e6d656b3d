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
        cases: Cases that are alike; a tuple holds the values of several arguments.
    """
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*each, marks=[pytest.mark.slow] if number % interval else [])
        for number, each in enumerate(values)
    ]
