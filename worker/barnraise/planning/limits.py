"""State how much of this machine a worker may use. Pure."""

from dataclasses import dataclass

from barnraise.errors import StateError

CLIPPINGS = ("auto", "none", "exact", "layer")
SAFETIES = ("auto", "exact", "restart")
PRECISIONS = ("auto", "float32", "bfloat16")
UNLIMITED = 10**18  # bytes a day to disk that are no limit
# What a worker with a limit of zero would do, where that makes no sense.
ZERO_EFFECTS = {"memory": "train", "device_memory": "compute", "uplink": "send"}


@dataclass(frozen=True)
class Limits:
    """What a worker may use; None means all there is, less what the system itself needs.

    Attributes:
        memory: bytes of RAM for the model and its state. The program takes some 300 MB besides,
            with CUDA's libraries up to 2 GB.
        device_memory: bytes of GPU memory, with what CUDA's libraries allocate there. On a machine
            without a GPU: the layers that are being computed stay in so much of the RAM.
        disk: bytes of disk for a run's text and for state that memory has no room for.
        disk_writes_per_day: bytes a day. None means 0.3 times the drive's size, because a consumer
            SSD wears out after some hundred times its size; UNLIMITED means no limit.
        uplink: bytes a second that updates may take of the line.
        clipping: gradients are clipped by the global norm ("exact"), by each layer's own norm
            ("layer"), or not at all ("none").
        crash_safety: what a crash costs with state on disk: the step ("exact", twice the space) or
            the round ("restart"). "auto" takes "exact" where it hardly costs time and writes.
        moments_bits: 32, or 8: a quarter of Adam's memory, slightly other results.
        precision: "float32", "bfloat16" or what pays on this machine ("auto").
        deterministic: whether a GPU gives the same bits each time, which takes longer.
        compiled: whether torch.compile joins a block's kernels; the first step takes minutes.
        announce: HOST:PORT at which peers reach this machine: of a port that is forwarded.
        port_mapping: whether the router is asked to forward the port.
        relay: whether others' updates are passed on before they are requested.
    """

    memory: int | None = None
    device_memory: int | None = None
    disk: int | None = None
    disk_writes_per_day: int | None = None
    uplink: int | None = None
    clipping: str = "auto"
    crash_safety: str = "auto"
    moments_bits: int = 32
    precision: str = "auto"
    deterministic: bool = False
    compiled: bool = False
    announce: tuple[str, ...] = ()
    port_mapping: bool = True
    relay: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "announce", tuple(self.announce))  # JSON has lists
        for name in ("memory", "device_memory", "disk", "disk_writes_per_day", "uplink"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise StateError(
                    f"the limit on {name.replace('_', ' ')} cannot be negative: {value}"
                )
            if value == 0 and name in ZERO_EFFECTS:
                raise StateError(
                    f"{name.replace('_', ' ')}: 0 would {ZERO_EFFECTS[name]} nothing; 'auto' is no "
                    "limit"
                )
        if self.clipping not in CLIPPINGS:
            raise StateError(
                f"clipping must be one of {', '.join(CLIPPINGS)}; '{self.clipping}' is not"
            )
        if self.crash_safety not in SAFETIES:
            raise StateError(
                f"crash safety must be one of {', '.join(SAFETIES)}; '{self.crash_safety}' is not"
            )
        if self.moments_bits not in (8, 32):
            raise StateError(f"Adam's moments take 32 or 8 bits, not {self.moments_bits}")
        if self.precision not in PRECISIONS:
            raise StateError(
                f"precision must be auto, float32 or bfloat16; '{self.precision}' is not"
            )
