"""Recognise the ranks that `torchrun` starts, by torch's environment variables. Without torch."""

import os

ONE_RANK = "BARNRAISE_ONE_RANK"  # set where ranks were lost too often: swap on one card


def count_ranks() -> int:
    """Return of how many ranks this process is one; 1 if torchrun has not started it."""
    count = os.environ.get("WORLD_SIZE", "1")
    return int(count) if "RANK" in os.environ and count.isdigit() else 1
