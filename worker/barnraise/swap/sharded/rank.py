"""A rank other than 0: it obeys rank 0's commands, and knows neither site nor peers.

python -m barnraise.swap.sharded.rank     with torch's environment variables
"""

import os
import signal
import sys
from typing import NoReturn

import torch
import torch.distributed as dist

from barnraise.errors import BarnraiseError, StateError
from barnraise.swap.executor import naming_failures
from barnraise.swap.sharded.heartbeat import Heartbeat
from barnraise.swap.sharded.rank_facts import collect_facts
from barnraise.swap.sharded.rank_place import RankPlace
from barnraise.swap.sharded.rank_program import WORDS, Opcode, RankProgram


def serve_commands(place: RankPlace, command: str = "") -> None:
    """Join the other ranks, and obey rank 0 until it ends all.

    Args:
        place: of this process.
        command: what all ranks were started for.

    Raises:
        StateError: a rank cannot be reached or is different, or a command failed here.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 saves the state first
        signal.signal(number, signal.SIG_IGN)
    store = place.find_others(collect_facts(place.device, command))
    heartbeat = Heartbeat(place.address, place.rank, place.ranks)
    words = torch.zeros(WORDS, dtype=torch.int64)
    try:
        with naming_failures(f"rank {place.rank} failed"):
            place.join_group(store)
            program = RankProgram(place.device)
            while True:
                dist.broadcast(words, 0)
                if words[0] == Opcode.END:
                    break
                program.execute(words.tolist(), None)
    except BarnraiseError as error:
        heartbeat.report_failure(str(error))
        raise StateError(str(error)) from error
    heartbeat.close()
    dist.destroy_process_group()


def main() -> None:
    """Serve as the rank that the environment states; print what went wrong in a sentence."""
    try:
        serve_commands(RankPlace.read())
    except BarnraiseError as error:
        print(f"barnraise: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    end_process()


def end_process() -> NoReturn:
    """End at once: gloo's threads may outlive the group, and their destructor would abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
