"""A rank that takes longer for each micro-batch: how many times as long is the only argument."""

import sys
import time

from torch import Tensor

from barnraise.swap.sharded import rank
from barnraise.swap.sharded.rank_program import Opcode, RankProgram

FACTOR = float(sys.argv[1])


class SlowedProgram(RankProgram):
    """A rank's part of the state, with sleep after its computations."""

    def execute(self, words: list[int], payload: Tensor | None) -> Tensor | None:
        """Do what a command says, and sleep if it was a micro-batch."""
        started = time.thread_time()
        result = super().execute(words, payload)
        if words[0] == Opcode.ACCUMULATE:
            time.sleep((FACTOR - 1) * (time.thread_time() - started))
        return result


if __name__ == "__main__":
    rank.RankProgram = SlowedProgram
    rank.main()
