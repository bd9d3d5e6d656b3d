"""Ours as `decentralized-adam`: neighbour mixing over iroh."""

from math import inf

import torch
from field_job import FieldJob, StepRecorder
from field_model import (
    BETAS,
    LEARNING_RATE,
    SEQUENCES,
    STEP_TOKENS,
    WEIGHT_DECAY,
    FieldGPT,
    batches,
    flatten,
    share_flat,
)
from torch import Tensor

from barnraise.exchange.mixing.accumulated_adam import AccumulatedAdam, AdamSettings
from barnraise.exchange.mixing.step_averaging import train_step
from barnraise.mixing.mesh_links import MeshLinks
from barnraise.mixing.mesh_members import FixedMembership
from barnraise.mixing.neighbour_mixing import MixingSettings, NeighbourMixing
from barnraise.mixing.payloads import payload_size
from barnraise.peering.limits.rate_limit import FairShare
from barnraise.peering.transports.iroh_transport import IrohTransport
from barnraise.planning.hardware import retain_freed_memory
from barnraise.planning.mixing_topology import find_topology
from barnraise.protocol.messages import Peer
from barnraise.protocol.signing import Identity

CONNECT_SECONDS = 60.0


def run_worker(job: FieldJob) -> None:
    """Train one worker's part."""
    retain_freed_memory()  # as a worker whose state is in RAM
    # Sorted by key, so that a worker's rank is its place in the roster.
    secrets = sorted(
        (bytes([rank + 1]) * 32 for rank in range(job.world)), key=lambda raw: Identity(raw).key
    )
    members = [
        Peer(key=Identity(secret).key, addresses=[f"{host}:{job.port}"])
        for secret, host in zip(secrets, job.hosts, strict=True)
    ]
    model = FieldGPT()
    weights = flatten(model)
    share_flat(model, weights)
    settings = MixingSettings(
        topology=find_topology(job.options.get("topology", "exponential")),
        bits=job.options.get("bits", 32),
        interval=job.options.get("interval", 1),
    )
    transport = IrohTransport(secrets[job.rank], host=job.hosts[job.rank], port=job.port)
    sizes = payload_size(weights.numel(), settings.bits), payload_size(weights.numel(), 32)
    uplink = FairShare(job.options.get("uplink", inf))
    links = MeshLinks(FixedMembership(transport, members), *sizes, uplink=uplink)
    links.start()
    links.wait_for(lambda inbox: len(inbox.neighbours) == job.world - 1, CONNECT_SECONDS)
    mixing = NeighbourMixing(links, settings)
    adam = AccumulatedAdam(weights, AdamSettings(betas=BETAS, weight_decay=WEIGHT_DECAY))
    text = batches(job.folder_path, job.rank, job.options.get("sequences", SEQUENCES))

    def compute_gradient() -> Tensor:
        for parameter in model.parameters():
            parameter.grad = None
        model(next(text)).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        return torch.cat([g.flatten() for g in gradients if g is not None])

    recorder = StepRecorder(job, STEP_TOKENS)
    recorder.wait_for_go()
    for _ in recorder.steps_left():
        waited_before = mixing.counts.waited_seconds
        train_step(mixing, adam, weights, compute_gradient, LEARNING_RATE)
        recorder.add_waiting(mixing.counts.waited_seconds - waited_before)
        if recorder.is_snapshot_due():
            recorder.record_weights(weights)
    recorder.wait_for_all()
    counts = mixing.counts
    recorder.record_figures(
        final=weights.double().norm().item(),
        messages=counts.messages,
        missed=counts.missed,
        waited_seconds=counts.waited_seconds,
    )
    links.stop()
