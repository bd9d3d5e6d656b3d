"""How much of this machine a worker may use. None: as much as there is (less what the system itself needs)."""

from dataclasses import dataclass

from barnraise.errors import StateError

CLIPPINGS = ("auto", "none", "exact", "layer")
SAFETIES = ("auto", "exact", "restart")


@dataclass(frozen=True)
class Limits:
    """Bytes. `memory` is for the model and its states: the program itself takes some 300 MB besides."""

    memory: int | None = None
    device_memory: int | None = (
        None  # on a machine without a GPU: keep the layers being computed in so much of the RAM
    )
    disk: int | None = None
    disk_writes_per_day: int | None = (
        None  # a consumer SSD wears out after some hundred times its size
    )
    uplink: int | None = None  # bytes a second that its updates may take of the line
    clipping: str = "auto"  # how gradients are clipped: by the global norm ("exact"), each layer's own, or not at all
    crash_safety: str = "auto"  # of a state on disk: lose the step ("exact", twice the space) or the round ("restart")
    moments_bits: int = 32  # 8: a quarter of Adam's memory, slightly other results
    precision: str = "auto"  # "float32", "bfloat16" or what pays on this machine

    def __post_init__(self) -> None:
        for name in ("memory", "device_memory", "disk", "disk_writes_per_day", "uplink"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise StateError(
                    f"the limit on {name.replace('_', ' ')} cannot be negative: {value}"
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
        if self.precision not in ("auto", "float32", "bfloat16"):
            raise StateError(
                f"precision must be auto, float32 or bfloat16; '{self.precision}' is not"
            )
