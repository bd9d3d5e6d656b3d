"""What a machine has after it joined a run, without a coordinator."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from example_hardware import ONE_CORE_MACHINE
from single_site import SingleSite

from barnraise.coordinator_client.failover import FailoverClient
from barnraise.planning.hardware import Hardware
from barnraise.protocol.coordinator_messages import Directive, TextManifest
from barnraise.protocol.enums import Role, RunStatus, Standing
from barnraise.protocol.messages import Peer, Signed, Ticket
from barnraise.protocol.mirror_list import MirrorLists, SignedMirrorList
from barnraise.protocol.signing import Identity, digest
from barnraise.spec import RunSpec
from barnraise.state_dir import StateDir
from barnraise.training.join import JoinedRun

RUN = "0192f0c1-2d3e-7f40-8a5b-6c7d8e9f0a1b"
UNREACHABLE_COORDINATOR = "http://127.0.0.1:9"  # nothing answers at the discard port
MIRROR = Identity(b"m" * 32)
UNLIMITED_TOKENS = 1 << 30  # per second: more than any machine trains


@dataclass(frozen=True)
class Setup:
    """What a machine is started with."""

    state_folder: Path
    spec: str
    manifest: str  # signed
    port: int
    # Keys of the peers that it dials first, with their ports on this host or their addresses.
    first_peers: tuple[tuple[str, int | str], ...]
    uplink: int | None = None  # bytes per second
    clock_offset: float = 0.0  # seconds by which its clock is ahead
    finished: bool = False  # The run is over; peers only exchange what is left.
    max_tokens_per_second: int = UNLIMITED_TOKENS  # of its ticket
    standing: Standing = Standing.STRANGER  # of its ticket
    rest_seconds: float = 0.0  # after each step, so that the machine's cores are never all busy
    mirror_lists: str = ""  # the `MirrorLists` that its coordinator has sent it
    profiled: bool = False  # Its exchange's threads are profiled, which makes them slower.
    hardware: Hardware = ONE_CORE_MACHINE
    device_memory: int | None = None  # bytes of GPU memory that it may use
    threads: int = 1
    trust_one: bool = True  # No site confirms weights.


def issue_ticket(
    key: str,
    volunteer: str,
    run: str = RUN,
    max_tokens_per_second: int = UNLIMITED_TOKENS,
    standing: Standing = Standing.STRANGER,
) -> Signed:
    """Sign a ticket that is valid for one day."""
    now = time.time()
    ticket = Ticket(
        run=run,
        peer=key,
        machine=machine_id(key),
        volunteer=digest(volunteer),
        roles=[Role.WORKER],
        standing=standing,
        max_tokens_per_second=max_tokens_per_second,
        issued=now,
        expires=now + 86400,
        mirror=MIRROR.key,
    )
    return MIRROR.sign("ticket", ticket)


def machine_id(key: str) -> str:
    """Return the identifier of the machine with this key."""
    return f"0192f0c1-2d3e-7f40-8a5b-{key[:12]}"


def build_joined_run(setup: Setup, state_dir: StateDir) -> JoinedRun:
    """Return what a worker that has joined gets from the coordinator, without one."""
    spec = RunSpec.from_json(setup.spec)
    manifest = Signed.model_validate_json(setup.manifest)
    key = state_dir.identity.key
    directive = Directive(
        run=RUN,
        machine=RUN,
        status=RunStatus.FINISHED if setup.finished else RunStatus.TRAINING,
        report_every=1.0,
        issued=time.time(),
    )
    return JoinedRun(
        run=RUN,
        name="a drill",
        machine=machine_id(key),
        folder=state_dir.open_run(RUN),
        coordinator=cast(FailoverClient, ClockedClient(setup, state_dir.identity)),
        spec=spec,
        spec_digest=digest(spec.to_json()),
        manifest=TextManifest.model_validate_json(manifest.body),
        ticket=issue_ticket(
            key,
            state_dir.path.name,
            max_tokens_per_second=setup.max_tokens_per_second,
            standing=setup.standing,
        ),
        directive=directive,
        acknowledged=0,
        peers=tuple(
            Peer(key=peer, addresses=[port if isinstance(port, str) else f"127.0.0.1:{port}"])
            for peer, port in setup.first_peers
        ),
        trust_one=setup.trust_one,
    )


class ClockedClient(SingleSite):
    """A client of the unreachable coordinator, whose clock may be wrong."""

    def __init__(self, setup: Setup, identity: Identity) -> None:
        """Create the client of the machine that `setup` describes."""
        super().__init__(UNREACHABLE_COORDINATOR, identity, MIRROR.key)
        self._drill_offset = setup.clock_offset
        lists = setup.mirror_lists
        self._mirror_lists = MirrorLists.model_validate_json(lists).lists if lists else []

    @property
    def mirror_lists(self) -> Sequence[SignedMirrorList]:
        """Return the mirror lists that the coordinator sent before it became unreachable."""
        return self._mirror_lists

    def now(self) -> float:
        """Return the wrong time, in seconds since 1970."""
        return super().now() + self._drill_offset
