"""Measure what `findings.py` judges: programs, memory, disk, the site, the network, the models."""

import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from barnraise import __version__
from barnraise.cli.doctor.findings import (
    Level,
    MachineFacts,
    MachineFinding,
    MirrorFacts,
    PresetFit,
)
from barnraise.cli.doctor.reach_verdict import NetworkFacts
from barnraise.cli.doctor.router_hops import find_hops
from barnraise.cli.mounts import find_mount
from barnraise.coordinator_client.client import CoordinatorClient
from barnraise.coordinator_client.failover import FailoverClient
from barnraise.errors import CoordinatorError, PlanError, StateError
from barnraise.peering.addresses.addresses import join_address, parse_address
from barnraise.peering.addresses.local_addresses import read_default_sources
from barnraise.planning.hardware import Hardware, available_memory, memory_bytes
from barnraise.planning.limits import Limits
from barnraise.planning.search import make_plan
from barnraise.protocol.certificates import find_named_certificates, trusted_certificates
from barnraise.protocol.http_client import describe_route
from barnraise.protocol.mirror_list import MirrorEntry
from barnraise.spec import FAMILIES, preset
from barnraise.state_dir import StateDir
from barnraise.training.local_status import read_status

HUB_URL = "https://huggingface.co"
MIRROR_TRIES = 3  # the fastest one counts
NETWORK_FILESYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs")


def measure_machine_facts(state_dir: StateDir, hardware: Hardware | None) -> MachineFacts:
    """Return what can be found on this machine alone, and at its site.

    Without `hardware`, the models are left out.
    """
    mirrors = tuple(measure_mirrors(state_dir)) if state_dir.is_enrolled else ()
    is_reachable = any(mirror.seconds is not None for mirror in mirrors)
    uplink, downlink = read_line_rates(state_dir)
    facts = MachineFacts(
        python=sys.version_info[:3],
        version=__version__,
        memory=memory_bytes(),
        memory_available=available_memory(),
        disk_free=shutil.disk_usage(state_dir.path).free,
        home=str(state_dir.path),
        home_error=find_write_error(state_dir.path),
        home_warning=describe_filesystem(state_dir.path, find_filesystem(state_dir.path)),
        open_files=count_open_files(),
        mirrors=mirrors,
        web=describe_web_access([*(mirror.url for mirror in mirrors), HUB_URL]),
        network=replace(measure_network(), is_site_reachable=is_reachable),
        has_upnp=importlib.util.find_spec("miniupnpc") is not None,
        uplink=uplink,
        downlink=downlink,
        presets=tuple(fit_presets(hardware, state_dir.limits)) if hardware else (),
    )
    return _with_device(facts)


def _with_device(facts: MachineFacts) -> MachineFacts:
    """Return the facts with those of PyTorch and the device that trains."""
    try:
        torch: Any = importlib.import_module("torch")
        device: Any = importlib.import_module("barnraise.swap.device")
    except (ImportError, OSError) as error:  # a library of its own may be missing
        return replace(facts, torch_error=str(error).splitlines()[0])
    from barnraise.planning.hardware import cpu_name

    choice = device.choose_device()
    return replace(
        facts,
        torch=str(torch.__version__),
        device_name=device.device_label(choice.name) or cpu_name(),
        device_note=choice.note,
        device_memory=device.total_memory(choice.name),
        device_memory_free=device.free_memory(choice.name),
    )


# ---- the folder of the state ---------------------------------------------------------------------


def find_write_error(folder: Path) -> str:
    """Return why nothing can be written to a folder; "" if it can."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return ""


def find_filesystem(folder: Path) -> str:
    """Return the type of the file system on which a folder lies; "" where it is not listed."""
    mount = find_mount(folder)
    return mount.kind if mount is not None else ""


def describe_filesystem(folder: Path, kind: str) -> str:
    """Return a sentence if a file system is one that loses or delays what is written. Pure."""
    if kind in NETWORK_FILESYSTEMS:
        return (
            f"{folder} lies on a network drive ({kind}), which is slow and may lose locks: name a "
            "folder on a local disk with --home FOLDER or the variable BARNRAISE_HOME."
        )
    if kind in ("tmpfs", "ramfs", "overlay"):
        return (
            f"{folder} lies on a {kind}: what this machine trained is lost when the machine or "
            "container ends. Name a folder on a disk or volume with --home FOLDER."
        )
    return ""


def count_open_files() -> int | None:
    """Return how many files this process may open; None where the system has no such limit."""
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


# ---- the site ------------------------------------------------------------------------------------


def measure_mirrors(state_dir: StateDir) -> Iterable[MirrorFacts]:
    """Measure how fast each mirror of this machine's site answers, and what its clock shows."""
    membership = state_dir.membership
    try:
        coordinator = FailoverClient.from_state_dir(state_dir)
    except StateError as error:  # the environment names certificates that cannot be read
        yield MirrorFacts(membership.url, error=str(error))
        return
    newest = coordinator.newest_list
    mirrors: list[MirrorEntry] = newest.active if newest else []
    urls = [mirror.url for mirror in mirrors] or [membership.url]
    coordinator.close()
    for url in urls:
        yield measure_mirror(CoordinatorClient(url, state_dir.identity))


def measure_mirror(client: CoordinatorClient) -> MirrorFacts:
    """Return how fast one mirror answers; the fastest of a few tries counts. Closes the client."""
    fastest: float | None = None
    with closing(client):
        try:
            for _ in range(MIRROR_TRIES):
                started = time.perf_counter()
                client.pin_mirror()
                seconds = time.perf_counter() - started
                fastest = seconds if fastest is None else min(fastest, seconds)
        except CoordinatorError as error:
            if fastest is None:
                return MirrorFacts(client.url, error=str(error))
    offset = client.clock_offset
    return MirrorFacts(client.url, fastest, clock_seconds=None if offset is None else -offset)


def describe_web_access(urls: Iterable[str]) -> MachineFinding:
    """Return which proxies are used for these addresses, and which certificates."""
    try:
        trusted_certificates()
        ways = [f"{url} {describe_route(url)[2:] or 'without a proxy'}" for url in urls]
    except StateError as error:
        return MachineFinding("Web", Level.PROBLEM, f"{error}.")
    variable, place = find_named_certificates()
    named = f"those in {place} ({variable})" if variable else "the usual ones (certifi)"
    sentence = f"Reached: {', '.join(ways)}. Trusted certificates: {named}."
    return MachineFinding("Web", Level.OK, sentence)


# ---- the network ---------------------------------------------------------------------------------


def measure_network() -> NetworkFacts:
    """Return how this machine is connected, as far as its own routing table says."""
    sources = read_default_sources().values()
    # A port makes addresses of them; this machine itself and one cable are no way to the internet.
    usable = [ip for ip in sources if parse_address(join_address(ip, 1))]
    ipv6 = next((ip for ip in usable if ":" in ip), "")
    ipv4 = next((ip for ip in usable if ip != ipv6), "")
    return NetworkFacts(
        has_ipv4=bool(ipv4),
        has_ipv6=bool(ipv6),
        hops=tuple(find_hops()) if ipv4 else (),
        lan_address=ipv4 or ipv6,
    )


def read_line_rates(state_dir: StateDir) -> tuple[float, float]:
    """Return bytes/s that the uplink carried and that were received, as workers here measured."""
    uplink = downlink = 0.0
    for folder in state_dir.run_folders():
        status = read_status(folder)
        if status and status.exchange:
            uplink = max(uplink, status.exchange.uplink_rate)
            downlink = max(downlink, status.exchange.received_rate)
    return uplink, downlink


# ---- the models ----------------------------------------------------------------------------------


def fit_presets(hardware: Hardware, limits: Limits) -> Iterable[PresetFit]:
    """Predict for each preset of the first family, from small to large, its speed here."""
    family = next(iter(FAMILIES.values()))
    for name in sorted(family, key=lambda name: preset(name).parameters):
        model = preset(name)
        try:
            plan = make_plan(hardware, model, limits, advise=False)
        except PlanError:
            yield PresetFit(name)
            return  # larger ones do not fit either
        tokens = plan.sequences * plan.micro_batches * model.context
        yield PresetFit(name, tokens / plan.step_seconds)
