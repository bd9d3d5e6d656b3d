"""The table of what strangers may use of this machine; docs/security.md quotes it. Pure.

A rate has two numbers because honest machines come in bursts: after a partition, at a start or when
a joiner catches up. Each rate per second is several times what an honest machine needs.
"""

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple


class Rate(NamedTuple):
    """How much is allowed.

    Attributes:
        per_second: On average.
        burst: At once.
    """

    per_second: float
    burst: float


class Service(Enum):
    """What others may use, in the words of docs/security.md."""

    QUIC_CONNECTIONS = "connections by QUIC"
    TLS_CONNECTIONS = "connections by TLS"
    INTRODUCTIONS = "introductions"
    FRAMES = "frames"
    FRAME_BYTES = "bytes of frames"
    HEADER_BYTES = "bytes of messages without their payloads"
    UPDATE_HEADERS = "headers of updates, before their signatures are verified"
    UNNEEDED_HEADERS = "headers of updates that are here already"
    REQUESTED_UPDATES = "updates and headers requested"
    UNWANTED_BYTES = "bytes of payloads that nothing waits for"
    SMALL_MIXING_FRAMES = "mixing frames without a whole piece of weights"
    SNAPSHOTS = "snapshots built"
    COPY_NOTICES = "notices of copied keys"
    LINE_TESTS = "line tests"
    DIAL_BACKS = "dial-backs requested"
    ERRANDS = "dial-backs for other peers"
    OBEYED_STATEMENTS = "dial-now statements obeyed"
    PASSED_STATEMENTS = "dial-now statements passed on"
    UNANSWERED_DIALS = "dials of unproven addresses that nobody answers"


_MIB = float(1 << 20)

# Service → group → rate. A group is a peer, key, volunteer, address and so on; "all" is everybody.
SERVICE_LIMITS: dict[Service, Mapping[str, Rate]] = {
    Service.QUIC_CONNECTIONS: {"address": Rate(2.0, 16.0), "network": Rate(16.0, 64.0)},
    # More than of QUIC: a computer of a cluster may have a worker for each GPU.
    Service.TLS_CONNECTIONS: {"address": Rate(4.0, 64.0), "network": Rate(32.0, 256.0)},
    Service.INTRODUCTIONS: {"key": Rate(0.5, 16.0)},
    Service.FRAMES: {"peer": Rate(1000.0, 5000.0)},
    Service.FRAME_BYTES: {"peer": Rate(128 * _MIB, 256 * _MIB)},
    # JSON takes the most time to process.
    Service.HEADER_BYTES: {"peer": Rate(2 * _MIB, 16 * _MIB)},
    # Each may need two signatures verified.
    Service.UPDATE_HEADERS: {"peer": Rate(100.0, 1000.0)},
    Service.UNNEEDED_HEADERS: {"peer": Rate(50.0, 3000.0)},
    # Each is looked up.
    Service.REQUESTED_UPDATES: {"peer": Rate(2000.0, 20_000.0)},
    Service.UNWANTED_BYTES: {"peer": Rate(16 * _MIB, 256 * _MIB)},
    # A step has a few of them, and each takes the event loop's time.
    Service.SMALL_MIXING_FRAMES: {"peer": Rate(1000.0, 5000.0)},
    # Each costs a copy of the model, made between two steps, and its bytes on the disk.
    Service.SNAPSHOTS: {"volunteer": Rate(1 / 60, 8.0)},
    Service.COPY_NOTICES: {"all": Rate(0.5, 10.0)},
    Service.LINE_TESTS: {
        "key": Rate(1 / 300, 2.0),
        "network": Rate(1 / 120, 3.0),
        "all": Rate(1 / 30, 4.0),
    },
    Service.DIAL_BACKS: {
        "key": Rate(1 / 120, 3.0),
        "network": Rate(1 / 60, 8.0),
        "all": Rate(1 / 10, 12.0),
    },
    # The volunteer passes the errand on; the network is the one that is dialled.
    Service.ERRANDS: {
        "volunteer": Rate(1 / 60, 4.0),
        "network": Rate(1 / 60, 4.0),
        "all": Rate(1 / 10, 12.0),
    },
    Service.OBEYED_STATEMENTS: {
        "signer": Rate(0.1, 2.0),
        "volunteer": Rate(0.2, 8.0),
        "all": Rate(0.5, 16.0),
    },
    Service.PASSED_STATEMENTS: {"volunteer": Rate(1.0, 32.0), "target": Rate(0.5, 16.0)},
    Service.UNANSWERED_DIALS: {"host": Rate(1 / 30, 6.0), "network": Rate(1 / 10, 24.0)},
}

# Service → group → how many may wait; the oldest makes room for the newest.
WAITING_LIMITS: dict[Service, Mapping[str, int]] = {
    Service.QUIC_CONNECTIONS: {"address": 4, "network": 16, "all": 64},
    Service.TLS_CONNECTIONS: {"address": 16, "network": 32, "all": 64},
    Service.INTRODUCTIONS: {"key": 2, "address": 4, "network": 16, "all": 64},
}
