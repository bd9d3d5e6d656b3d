"""Import what only the extra `barnraise[text]` brings."""

from collections.abc import Iterator
from contextlib import contextmanager

from barnraise.errors import TextError


@contextmanager
def needs_extra(problem: str) -> Iterator[None]:
    """Turn a failed import into a TextError: the problem, and how to install what is missing."""
    try:
        yield
    except ImportError:
        raise TextError(f"{problem} yet: pip install 'barnraise[text]', then try again") from None
