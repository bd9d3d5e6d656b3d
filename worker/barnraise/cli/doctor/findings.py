"""Judge what a machine has, from facts: one sentence for each, with the remedy of a problem. Pure.

Nothing here reads the machine: `measurements.py` does.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from barnraise.cli.doctor.reach_verdict import (
    NetworkFacts,
    ReachVerdict,
    describe_absence,
    describe_dial_backs,
    describe_reach,
    judge_reach,
)
from barnraise.formats import format_bytes
from barnraise.protocol.clock import is_clock_wrong

OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 14)  # that were tried
LEAST_MEMORY = 1_000_000_000  # bytes of RAM with which the smallest preset trains
LEAST_DISK = 2_000_000_000
LEAST_OPEN_FILES = 256
SLOW_SECONDS = 2.0  # in which a mirror should answer
SITE_REMEDY = ": check the network, the proxy (HTTPS_PROXY) and the certificates (SSL_CERT_FILE)"


class Level(StrEnum):
    """How serious a finding is."""

    OK = "ok"
    UNKNOWN = "unknown"  # it could not be checked
    WARNING = "warning"  # training works, worse than it could
    PROBLEM = "problem"  # training does not work


@dataclass(frozen=True)
class MachineFinding:
    """One thing that was checked."""

    subject: str
    level: Level
    sentence: str  # what was found and, for a problem, what to do


@dataclass(frozen=True)
class MirrorFacts:
    """How a mirror answers."""

    url: str
    seconds: float | None = None  # of the fastest answer; None if there was none
    error: str = ""  # why there was none
    clock_seconds: float | None = None  # by which this machine's clock is ahead; None if unknown


@dataclass(frozen=True)
class PresetFit:
    """How a preset would train here."""

    name: str
    tokens_per_second: float = 0.0  # 0 if it does not fit


@dataclass(frozen=True)
class MachineFacts:
    """What a machine has, as measured. Memory and disk space are in bytes."""

    python: tuple[int, int, int]  # its version
    version: str = ""  # the worker's own
    torch: str = ""  # its version; "" if it cannot be imported
    torch_error: str = ""
    device_name: str = ""
    device_note: str = ""  # why a GPU is not used
    device_memory: int = 0
    device_memory_free: int = 0
    memory: int = 0  # RAM that this process may use at most
    memory_available: int = 0  # of it, what other programs leave
    disk_free: int = 0  # where the state lies
    home: str = ""  # the folder of the state
    home_error: str = ""  # why nothing can be written there
    home_warning: str = ""  # what is unusual about it
    open_files: int | None = None  # that this process may open; None without a limit
    mirrors: tuple[MirrorFacts, ...] = ()  # empty for a machine that is not enrolled
    web: MachineFinding | None = None  # which proxies and certificates are used
    network: NetworkFacts = field(default_factory=NetworkFacts)
    has_upnp: bool = True  # whether its package is installed
    run_error: str = ""  # why the machines of the named run could not be asked
    uplink: float = 0.0  # bytes/s that it was measured to carry; 0 if that is not known
    downlink: float = 0.0  # bytes/s that were received at most; 0 if that is not known
    presets: tuple[PresetFit, ...] = ()  # from small to large; empty if nothing was measured


def judge_machine(facts: MachineFacts) -> list[MachineFinding]:
    """Return a finding for everything that was checked, in the order of a person's questions."""
    return [
        *_judge_programs(facts),
        *_judge_memory(facts),
        *_judge_home(facts),
        *([facts.web] if facts.web else []),
        *_judge_mirrors(facts),
        *_judge_run(facts),
        *_judge_network(facts.network),
        *_judge_router(facts),
        *_judge_line(facts),
        *_judge_presets(facts),
    ]


def _judge_programs(facts: MachineFacts) -> list[MachineFinding]:
    version = ".".join(map(str, facts.python))
    sentence = f"Python {version}, Barnraise {facts.version}."
    findings = [MachineFinding("Python", Level.OK, sentence)]
    if not OLDEST_PYTHON <= facts.python[:2] <= NEWEST_PYTHON:
        oldest, newest = (".".join(map(str, bound)) for bound in (OLDEST_PYTHON, NEWEST_PYTHON))
        sentence = (
            f"Python {version} is none of {oldest} to {newest}: `uv python install 3.13` installs "
            "one, and `uv tool install --python 3.13` the worker with it."
        )
        findings = [MachineFinding("Python", Level.PROBLEM, sentence)]
    if not facts.torch:
        sentence = (
            f"PyTorch cannot be imported ({facts.torch_error}): install it as the page "
            "pytorch.org/get-started says for this machine."
        )
        return [*findings, MachineFinding("PyTorch", Level.PROBLEM, sentence)]
    findings.append(MachineFinding("PyTorch", Level.OK, f"PyTorch {facts.torch}."))
    if facts.device_memory:
        free, total = format_bytes(facts.device_memory_free), format_bytes(facts.device_memory)
        is_taken = facts.device_memory_free < facts.device_memory / 2
        advice = "; close the programs that use it to train faster" if is_taken else ""
        sentence = f"{facts.device_name}: {free} of {total} are free{advice}."
        level = Level.WARNING if is_taken else Level.OK
        findings.append(MachineFinding("GPU", level, sentence))
    elif facts.device_note:
        findings.append(MachineFinding("GPU", Level.WARNING, f"{facts.device_note}."))
    else:
        findings.append(MachineFinding("CPU", Level.OK, f"{facts.device_name}; no GPU is used."))
    return findings


def _judge_memory(facts: MachineFacts) -> list[MachineFinding]:
    shown = f"{format_bytes(facts.memory_available)} of {format_bytes(facts.memory)} of RAM"
    if facts.memory_available >= LEAST_MEMORY:
        finding = MachineFinding("Memory", Level.OK, f"{shown} are available.")
    elif facts.memory < LEAST_MEMORY:
        sentence = (
            f"This machine or container has {format_bytes(facts.memory)} of RAM: give it "
            f"{format_bytes(LEAST_MEMORY)} or more (docker run --memory 2g)."
        )
        finding = MachineFinding("Memory", Level.PROBLEM, sentence)
    else:
        sentence = f"Only {shown} are available: close other programs before you join."
        finding = MachineFinding("Memory", Level.WARNING, sentence)
    return [finding]


def _judge_home(facts: MachineFacts) -> list[MachineFinding]:
    findings: list[MachineFinding] = []
    if facts.home_error:
        sentence = (
            f"Nothing can be written to {facts.home} ({facts.home_error}): name another folder "
            "with --home FOLDER or the variable BARNRAISE_HOME."
        )
        findings.append(MachineFinding("State folder", Level.PROBLEM, sentence))
    elif facts.home_warning:
        findings.append(MachineFinding("State folder", Level.WARNING, facts.home_warning))
    if facts.disk_free < LEAST_DISK:
        sentence = (
            f"Only {format_bytes(facts.disk_free)} are free in {facts.home}: free "
            f"{format_bytes(LEAST_DISK)}, or name a folder on another disk with --home."
        )
        findings.append(MachineFinding("Disk", Level.PROBLEM, sentence))
    else:
        sentence = f"{format_bytes(facts.disk_free)} are free in {facts.home}."
        findings.append(MachineFinding("Disk", Level.OK, sentence))
    if facts.open_files is not None and facts.open_files < LEAST_OPEN_FILES:
        sentence = (
            f"This process may open {facts.open_files} files: run `ulimit -n 4096` before, or "
            "raise LimitNOFILE of the service."
        )
        findings.append(MachineFinding("Open files", Level.WARNING, sentence))
    return findings


def _judge_mirrors(facts: MachineFacts) -> list[MachineFinding]:
    if not facts.mirrors:
        sentence = "This machine is not enrolled yet: run `barnraise login URL`."
        return [MachineFinding("Site", Level.WARNING, sentence)]
    findings: list[MachineFinding] = []
    any_answers = any(mirror.seconds is not None for mirror in facts.mirrors)
    for mirror in facts.mirrors:
        if mirror.seconds is None:
            level = Level.WARNING if any_answers else Level.PROBLEM
            others = "; the others take its place" if any_answers else SITE_REMEDY
            sentence = f"{mirror.url} does not answer ({mirror.error}){others}."
            findings.append(MachineFinding("Site", level, sentence))
        else:
            level = Level.OK if mirror.seconds < SLOW_SECONDS else Level.WARNING
            sentence = f"{mirror.url} answers in {1000 * mirror.seconds:,.0f} ms."
            findings.append(MachineFinding("Site", level, sentence))
    offsets = sorted(
        (m.clock_seconds, m.seconds or 0.0) for m in facts.mirrors if m.clock_seconds is not None
    )
    if offsets:
        findings.append(_judge_clock(*offsets[len(offsets) // 2]))
    return findings


def _judge_run(facts: MachineFacts) -> list[MachineFinding]:
    if not facts.run_error:
        return []
    sentence = f"The machines of the run could not be asked: {facts.run_error.rstrip('.')}."
    return [MachineFinding("Run", Level.PROBLEM, sentence)]


def _judge_clock(ahead: float, round_trip: float) -> MachineFinding:
    if not is_clock_wrong(ahead, round_trip):
        return MachineFinding("Clock", Level.OK, "The clock agrees with the site's.")
    direction = "ahead of" if ahead > 0 else "behind"
    sentence = (
        f"The clock is {abs(ahead):,.0f} seconds {direction} the site's: set it by the internet "
        "(Linux: timedatectl set-ntp true; Windows and macOS: the settings of date and time)."
    )
    return MachineFinding("Clock", Level.WARNING, sentence)


REACH_LEVELS = {  # of the verdicts that are not in order
    ReachVerdict.UNKNOWN: Level.UNKNOWN,
    ReachVerdict.FIREWALL: Level.WARNING,
    ReachVerdict.DOUBLE_NAT: Level.WARNING,
    ReachVerdict.SYMMETRIC_NAT: Level.WARNING,
    ReachVerdict.UDP_BLOCKED: Level.PROBLEM,
    ReachVerdict.PEER_SILENT: Level.WARNING,
    ReachVerdict.IPV6_ONLY: Level.WARNING,
    ReachVerdict.NO_NETWORK: Level.WARNING,  # machines of its own network may train with it
}


def _judge_network(network: NetworkFacts) -> list[MachineFinding]:
    verdict = judge_reach(network)
    level = REACH_LEVELS.get(verdict, Level.OK)
    findings = [MachineFinding("Peers", level, describe_reach(network))]
    if network.has_asked_peers:
        findings.append(MachineFinding("Incoming", Level.OK, describe_dial_backs(network)))
    return findings


def _judge_router(facts: MachineFacts) -> list[MachineFinding]:
    if facts.has_upnp:
        return []
    sentence = (
        "UPnP is not available, because miniupnpc has no package for this system and Python: a "
        "router that knows neither PCP nor NAT-PMP is not asked to open a port. If peers do not "
        "reach this machine, open the UDP port in the router by hand and join with --port PORT."
    )
    return [MachineFinding("Router", Level.OK, sentence)]


def _judge_line(facts: MachineFacts) -> list[MachineFinding]:
    line = facts.network.line
    if not (facts.network.has_asked_peers or facts.uplink):
        return []
    if line.up and line.down:
        sentence = (
            f"This machine sends {format_bytes(line.up)}/s to a peer and receives "
            f"{format_bytes(line.down)}/s from it, measured now with at most 2 MB each way."
        )
    elif line.down:
        sentence = (
            f"This machine receives {format_bytes(line.down)}/s from a peer, measured now; too "
            "little reached the peer in five seconds to measure the uplink."
        )
    elif facts.network.has_asked_peers and not facts.network.peers_connected:
        absence = describe_absence(facts.network)
        sentence = f"Up- and downlink were not measured: {absence}."
    else:
        sentence = "Up- and downlink were not measured with a peer now."
    if facts.uplink:
        sentence += f" In its runs the uplink carried {format_bytes(facts.uplink)}/s"
        received = f"; up to {format_bytes(facts.downlink)}/s were received"
        sentence += f"{received}." if facts.downlink else "."
    return [MachineFinding("Line", Level.OK, sentence)]


def _judge_presets(facts: MachineFacts) -> list[MachineFinding]:
    if not facts.presets:
        return []
    fitting = [fit for fit in facts.presets if fit.tokens_per_second]
    if not fitting:
        sentence = "No preset fits: free memory and disk, or raise the limits (`barnraise limits`)."
        return [MachineFinding("Models", Level.PROBLEM, sentence)]
    shown = ", ".join(f"{fit.name} {fit.tokens_per_second:,.0f}" for fit in fitting)
    largest = fitting[-1].name
    sentence = f"Models up to {largest} fit; predicted tokens a second: {shown}."
    return [MachineFinding("Models", Level.OK, sentence)]
