"""Which of several ranks a process is, and how it joins the others."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from barnraise.errors import StateError
from barnraise.swap.device import has_streams, select_device
from barnraise.swap.sharded.key_value_store import Store, StoreAddress, first_line
from barnraise.swap.sharded.rank_facts import REACH_SECONDS, agree_on_facts

RANK_DEVICE = "BARNRAISE_RANK_DEVICE"  # what a rank that a worker has started computes with
TRIAL_SIZE = 1 << 16  # numbers that each rank sends to all others at the start
# Between two commands hours may pass, in a pause. The heartbeat notices ranks that die.
COLLECTIVE_TIMEOUT = timedelta(days=30)


@dataclass(frozen=True)
class RankPlace:
    """Which of the ranks this process is, as torch's environment variables state it.

    Attributes:
        rank: from 0.
        ranks: how many there are.
        device: where it computes.
        address: of the ranks' store.
    """

    rank: int
    ranks: int
    device: torch.device
    address: StoreAddress

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> "RankPlace":
        """Return the place that the variables state.

        Raises:
            StateError: a variable is missing or is no number.
        """
        try:
            card = f"cuda:{int(environment.get('LOCAL_RANK', '0'))}"
            device = card if torch.cuda.is_available() else "cpu"
            attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
            host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
            return cls(
                rank=int(environment["RANK"]),
                ranks=int(environment["WORLD_SIZE"]),
                device=torch.device(environment.get(RANK_DEVICE, device)),
                address=StoreAddress(host, port, f"barnraise/{attempt}"),
            )
        except (KeyError, ValueError) as error:
            raise StateError(
                f"torch's environment variables do not state which rank this is ({error}): start "
                "all ranks with torchrun"
            ) from None

    def to_environment(self) -> dict[str, str]:
        """Return the variables for `read`."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": self.address.host,
            "MASTER_PORT": str(self.address.port),
            RANK_DEVICE: str(self.device),
        }

    def find_others(self, facts: Mapping[str, str]) -> Store:
        """Connect to the store, and compare facts with all other ranks.

        Raises:
            StateError: a rank cannot be reached or is different.
        """
        try:
            store = self.address.connect(REACH_SECONDS)
        except RuntimeError as error:
            raise StateError(
                f"rank {self.rank} does not reach {self.address.host}:{self.address.port} within "
                f"{REACH_SECONDS:.0f} s: {first_line(error)}"
            ) from None
        agree_on_facts(store, self.rank, self.ranks, facts)
        return store

    def join_group(self, store: Store) -> None:
        """Join torch's process group, whose collectives of host tensors are gloo's.

        Raises:
            StateError: a collective returns other values than were sent.
        """
        has_card = has_streams(self.device)
        if has_card:
            select_device(self.device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if has_card else "gloo",
            store=store,
            rank=self.rank,
            world_size=self.ranks,
            timeout=COLLECTIVE_TIMEOUT,
        )
        self._try_collective()

    def _try_collective(self) -> None:
        """Gather known numbers from all ranks: cards have returned zeros without an error."""
        numbers = torch.arange(1, TRIAL_SIZE + 1, dtype=torch.float32)
        gathered = [torch.zeros(TRIAL_SIZE, device=self.device) for _ in range(self.ranks)]
        dist.all_gather(gathered, (numbers + self.rank).to(self.device))
        for rank, part in enumerate(gathered):
            if not torch.equal(part.cpu(), numbers + rank):
                raise StateError(
                    f"what rank {rank} sent to rank {self.rank} came as other numbers: set "
                    "NCCL_P2P_DISABLE=1, or use --engine swap"
                )
