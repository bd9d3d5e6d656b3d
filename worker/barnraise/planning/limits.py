"""State how much of this machine a worker may use. Pure."""

from dataclasses import dataclass, replace

from barnraise.errors import StateError
from barnraise.planning.weekly_hours import parse_hours
from barnraise.protocol.rule_sizes import MAX_HOURS, MAX_PROGRAM_NAME, MAX_PROGRAMS

CHOICES = {
    "clipping": ("auto", "none", "exact", "layer"),
    "crash_safety": ("auto", "exact", "restart"),
    "moments_bits": (8, 32),
    "precision": ("auto", "float32", "bfloat16"),
    "engine": ("auto", "swap", "sharded"),
}
UNLIMITED = 10**18  # bytes a day to disk that are no limit
# What a worker with a limit of zero would do, where that makes no sense.
ZERO_EFFECTS = {
    "memory": "train",
    "device_memory": "compute",
    "uplink": "send",
    "month_up": "send",
    "download": "receive",
}
SIZES = ("memory", "device_memory", "disk", "disk_writes_per_day", "uplink", "month_up", "download")
SLOWEST_DOWNLOAD = 20_000  # bytes a second: slower links would be given up by their peers
# The smallest and largest value of a number, its option, and how people write it.
RANGES = {
    "idle": (1, 1440, "minutes without keyboard and mouse, like --idle 10"),
    "busy_cpu": (1, 99, "a percentage of the CPU, like --busy-cpu 50"),
    "threads": (1, 4096, "a number of CPU threads, like --threads 4"),
    "cpu": (1, 100, "a percentage of the time, like --cpu 50"),
    "max_temperature": (40, 110, "degrees Celsius, like --max-temperature 85"),
    "tensor": (2, 64, "a number of cards, like --tensor 2"),
}


@dataclass(frozen=True)
class Limits:
    """What a worker may use; None means all there is, less what the system itself needs."""

    # Bytes of RAM for the model and its state. The program takes some 300 MB besides, with CUDA's
    # libraries up to 2 GB.
    memory: int | None = None
    # Bytes of GPU memory, with what CUDA's libraries allocate there. On a machine without a GPU:
    # the layers that are being computed stay in so much of the RAM.
    device_memory: int | None = None
    disk: int | None = None  # bytes for a run's text and for state that memory has no room for
    # Bytes a day. None means 0.3 times the drive's size, because a consumer SSD wears out after
    # some hundred times its size; UNLIMITED means no limit.
    disk_writes_per_day: int | None = None
    uplink: int | None = None  # bytes a second that updates may take of the line
    # Gradients are clipped by the global norm ("exact"), by each layer's own ("layer"), or not.
    clipping: str = "auto"
    # What a crash costs with state on disk: the step ("exact", twice the space) or the round
    # ("restart"). "auto" takes "exact" where it hardly costs time and writes.
    crash_safety: str = "auto"
    moments_bits: int = 32  # or 8: a quarter of Adam's memory, slightly other results
    precision: str = "auto"  # "float32", "bfloat16" or what pays on this machine
    deterministic: bool = False  # whether a GPU gives the same bits each time: it takes longer
    # How several cards work: over one copy of the state in RAM ("swap"), each with a part of the
    # state ("sharded"), or as the planner chooses ("auto"), which so far is "swap".
    engine: str = "auto"
    tensor: int | None = None  # cards that split each block with "sharded"; None: the planner's
    announce: tuple[str, ...] = ()  # HOST:PORT at which peers reach it: of a forwarded port
    port_mapping: bool = True  # whether the router is asked to forward the port
    relay: bool = True  # whether others' updates are passed on before they are requested
    hours: str = ""  # of a week in which it may train, see `weekly_hours`; "" for all
    idle: int | None = None  # minutes without keyboard and mouse before it trains
    on_battery: bool = False  # whether it trains while the machine runs on its battery
    busy_cpu: int | None = None  # percentage of the CPU; it pauses while other programs use more
    pause_for: tuple[str, ...] = ()  # programs by name; it pauses while one of them runs
    threads: int | None = None  # CPU threads to train with, at most
    cpu: int | None = None  # percentage of the time in which it computes
    max_temperature: int | None = None  # degrees Celsius of CPU or GPU from which it pauses
    month_up: int | None = None  # bytes that it may send to peers in a calendar month
    download: int | None = None  # bytes a second that it may receive from peers

    @property
    def has_sizes(self) -> bool:
        """Whether memory or disk is limited."""
        return any(size is not None for size in (self.memory, self.device_memory, self.disk))

    def __post_init__(self) -> None:
        object.__setattr__(self, "announce", tuple(self.announce))  # JSON has lists
        object.__setattr__(self, "pause_for", tuple(self.pause_for))
        for name in SIZES:
            value = getattr(self, name)
            if value is not None and not 0 <= value <= UNLIMITED:  # a file may have Infinity
                raise StateError(
                    f"the limit on {name.replace('_', ' ')} cannot be negative or without end: "
                    f"{value}"
                )
            if value == 0 and name in ZERO_EFFECTS:
                raise StateError(
                    f"{name.replace('_', ' ')}: 0 would {ZERO_EFFECTS[name]} nothing; 'auto' is no "
                    "limit"
                )
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise StateError(
                    f"{name.replace('_', ' ')} must be one of {', '.join(map(str, choices))}; "
                    f"'{getattr(self, name)}' is not"
                )
        self._check_rules()

    def _check_rules(self) -> None:
        """Raise StateError where a rule that says when to train cannot be obeyed."""
        for name, (low, high, example) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise StateError(
                    f"{name.replace('_', ' ')} is {example}: from {low} to {high}, not {value}"
                )
        if self.download is not None and self.download < SLOWEST_DOWNLOAD:
            raise StateError(
                f"a download of {self.download:,} bytes a second would lose every peer; write at "
                "least --download 20KB"
            )
        if len(self.hours) > MAX_HOURS:
            raise StateError(f"hours are a text of at most {MAX_HOURS} characters")
        if self.hours:
            parse_hours(self.hours)
        if len(self.pause_for) > MAX_PROGRAMS:
            raise StateError(f"pause for names at most {MAX_PROGRAMS} programs")
        for program in self.pause_for:
            is_name = 0 < len(program) <= MAX_PROGRAM_NAME and program.isprintable()
            if not is_name or "/" in program or "\\" in program:
                raise StateError(
                    f"pause for: '{program}' is no program's name; write it like --pause-for "
                    "blender,steam, without folders"
                )


def merge_limits(before: Limits, given: Limits, now: Limits) -> Limits:
    """Return the limits of now with what was given, except where the owner has set others since.

    Args:
        before: the owner's limits when `given` was made of them.
        given: those limits with some replaced.
        now: the owner's limits at present, which win where they differ from `before`.
    """
    old, new = vars(before), vars(given)
    unchanged = {name: new[name] for name, value in vars(now).items() if value == old[name]}
    return replace(now, **unchanged)
