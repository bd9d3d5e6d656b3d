"""Open a sharded engine: on ranks of this machine, or on those that `torchrun` has started.

A cluster of one owner's machines is torch's to describe: its environment variables are the whole
interface.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import replace

from barnraise.planning.plan import Plan
from barnraise.spec import Recipe
from barnraise.swap.engine import AnchorLike
from barnraise.swap.executor import EngineProgress
from barnraise.swap.sharded.key_value_store import serve_store
from barnraise.swap.sharded.rank_facts import REACH_SECONDS
from barnraise.swap.sharded.rank_group import RankGroup
from barnraise.swap.sharded.rank_place import RankPlace
from barnraise.swap.sharded.sharded_engine import ShardedEngine
from barnraise.swap.state_store import StateStore

log = logging.getLogger("barnraise")

AGENTS_STORE = "TORCHELASTIC_USE_AGENT_STORE"

_joined: list[RankGroup] = []  # the cluster's, if this process is its rank 0


@contextlib.contextmanager
def lead_cluster(command: str) -> Iterator[None]:
    """Lead the ranks that `torchrun` has started while the block runs; `command` is theirs too.

    Raises:
        StateError: a rank cannot be reached or is different.
    """
    log.info(
        "gloo and NCCL neither encrypt nor verify what the ranks of this cluster send each other: "
        "it is for one owner's machines in one network"
    )
    place = RankPlace.read()
    store = None
    if os.environ.get(AGENTS_STORE) != "True":  # another program than torchrun serves none
        store = serve_store(place.address.host, place.address.port, REACH_SECONDS)
    group = RankGroup(place, command, store=store)
    log.info("all %d ranks have joined", group.ranks)
    _joined.append(group)
    try:
        yield
    finally:
        _joined.remove(group)
        group.close()


class StandaloneEngine(ShardedEngine):
    """A sharded engine on ranks that were started for it alone."""

    def close(self) -> None:
        """Free the memory, and end the ranks."""
        try:
            super().close()
        finally:
            self._group.close()


def open_sharded_engine(
    plan: Plan,
    recipe: Recipe,
    store: StateStore,
    anchor: AnchorLike,
    progress: EngineProgress | None,
) -> ShardedEngine:
    """Open an engine on the ranks of a cluster, or on processes that it starts.

    Raises:
        StateError: a rank cannot be reached or is different.
    """
    if _joined:
        return ShardedEngine(plan, recipe, store, anchor, _joined[-1], progress)
    group = RankGroup.start(plan.ranks)
    plan = replace(plan, threads=max(1, plan.threads // group.ranks))
    try:
        return StandaloneEngine(plan, recipe, store, anchor, group, progress)
    except BaseException:
        group.close()
        raise
