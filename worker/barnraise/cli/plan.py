"""`barnraise plan` and `barnraise limits`: what this machine may give, what it can do, and how a model would train."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from filelock import FileLock
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from barnraise.formats import parse_bytes
from barnraise.planning.hardware import Hardware, UpdateRate
from barnraise.planning.limits import Limits
from barnraise.protocol.reports import HardwareView
from barnraise.state_dir import StateDir
from barnraise.swap.hardware_probe import probe

GPU_UPDATES = (
    ("float32", 32, 2e10),
    ("bfloat16", 32, 8e9),
    ("float32", 8, 5e9),
    ("bfloat16", 8, 4e9),
)  # assumed

app = typer.Typer()
out = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

HomeOption = Annotated[
    Path | None,
    typer.Option(
        "--home", envvar="BARNRAISE_HOME", help="Where this machine's key and state live."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
DeviceOption = Annotated[
    str, typer.Option(help="cpu, cuda or cuda:1 (default: fastest available).")
]
ThreadsOption = Annotated[
    int, typer.Option(min=0, help="CPU threads to train with; 0: as many as cores.")
]
HardwareOption = Annotated[
    Path | None,
    typer.Option(
        "--hardware",
        envvar="BARNRAISE_HARDWARE",
        help="Keep this machine's measurements here, for several workers.",
    ),
]
MemoryOption = Annotated[
    str, typer.Option(help="RAM the model may use, like 4GB; 'auto': no limit.")
]
DeviceMemoryOption = Annotated[
    str, typer.Option(help="GPU memory it may use; without a GPU: RAM to compute in.")
]
DiskOption = Annotated[str, typer.Option(help="Disk space its state may take.")]
WritesOption = Annotated[str, typer.Option(help="Bytes a day its training may write to disk.")]
UplinkOption = Annotated[str, typer.Option(help="Bytes a second its updates may take of the line.")]
ClippingOption = Annotated[str, typer.Option(help="auto, exact, layer or none.")]
SafetyOption = Annotated[str, typer.Option(help="Of a state on disk: auto, exact or restart.")]
EightOption = Annotated[
    bool | None, typer.Option("--moments-8bit/--moments-32bit", help="Adam's moments.")
]


@app.command()
def limits(
    home: HomeOption = None,
    memory: MemoryOption = "",
    device_memory: DeviceMemoryOption = "",
    disk: DiskOption = "",
    disk_writes_per_day: WritesOption = "",
    uplink: UplinkOption = "",
    clipping: ClippingOption = "",
    crash_safety: SafetyOption = "",
    moments_8bit: EightOption = None,
    as_json: JsonOption = False,
) -> None:
    """Set or show how much of this machine a worker may use, from the next join on."""
    place = StateDir(home or StateDir.default_path())
    given = memory, device_memory, disk, disk_writes_per_day, uplink
    kept = limited(place.limits, given, clipping, crash_safety, moments_8bit)
    if kept != place.limits:
        place.limits = kept
    if as_json:
        out.print_json(json.dumps(dataclasses.asdict(kept)))
        return
    from barnraise.formats import format_bytes

    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in dataclasses.asdict(kept).items():
        shown = (
            "no limit"
            if value is None
            else format_bytes(value)
            if isinstance(value, int) and value > 64
            else value
        )
        table.add_row(name.replace("_", " "), str(shown))
    out.print(table)


def limited(
    limits: Limits, given: tuple[str, ...], clipping: str, safety: str, eight: bool | None
) -> Limits:
    """Replace the limits that were given: sizes of memory, device memory, disk, daily writes and uplink; "" leaves one as it
    is."""
    names = ("memory", "device_memory", "disk", "disk_writes_per_day", "uplink")
    changed: dict[str, Any] = {
        name: None if text == "auto" else parse_bytes(text)
        for name, text in zip(names, given, strict=True)
        if text
    }
    changed |= {
        name: text for name, text in (("clipping", clipping), ("crash_safety", safety)) if text
    }
    if eight is not None:
        changed["moments_bits"] = 8 if eight else 32
    return dataclasses.replace(limits, **changed)


@app.command()
def plan(
    model: Annotated[str, typer.Option(help="A preset, like gpt2-1.5b.")],
    home: HomeOption = None,
    device: DeviceOption = "",
    threads: ThreadsOption = 0,
    memory: MemoryOption = "",
    device_memory: DeviceMemoryOption = "",
    disk: DiskOption = "",
    disk_writes_per_day: WritesOption = "",
    clipping: ClippingOption = "",
    crash_safety: SafetyOption = "",
    moments_8bit: EightOption = None,
    sequences: Annotated[int, typer.Option(min=1, max=65536, help="Sequences of one step.")] = 8,
    gpu_tflops: Annotated[
        float, typer.Option(min=0.1, help="Of a GPU that is not here: sustained, in bf16.")
    ] = 60.0,
    gpu_link: Annotated[
        str, typer.Option(help="Bytes a second between that GPU and memory.")
    ] = "20GB",
    hardware: HardwareOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how a model would train here, or with the limits given.

    Dry run: it shows what lies where, what overlaps and how long a step takes.
    """
    from barnraise.planning.search import make_plan
    from barnraise.spec import preset

    shape = preset(model)
    place = StateDir(home or StateDir.default_path())
    given = memory, device_memory, disk, disk_writes_per_day, ""
    limits = limited(place.limits, given, clipping, crash_safety, moments_8bit)
    measured, assumed = measure(place, "", threads, hardware), ""
    if device.startswith("cuda") and measured.device != "cuda":
        rate = parse_bytes(gpu_link)
        measured = assumed_gpu(
            measured, gpu_tflops * 1e12, rate, limits.device_memory or 24 * 10**9
        )
        assumed = (
            f"No GPU was measured here: {gpu_tflops:g} TFLOP/s and {gpu_link}/s to it are assumed."
        )
    elif device == "cpu" and measured.device != "cpu":
        measured = measure(place, "cpu", threads, hardware)
    elif limits.device_memory and measured.device != "cuda":
        assumed = "No GPU here: the layers being computed are kept in so much of the RAM. --device cuda assumes a GPU."
    # What is said to be there is there, for a machine that is only thought of.
    there = {"memory": limits.memory, "device_memory": limits.device_memory, "disk": limits.disk}
    found = make_plan(
        dataclasses.replace(
            measured, **{n: max(getattr(measured, n), v) for n, v in there.items() if v}
        ),
        shape,
        limits,
        sequences,
    )
    from barnraise.planning import render

    if as_json:
        told = dataclasses.asdict(found) | {
            "tokens": render.tokens(found), "tokens_per_second": render.tokens(found) / found.step_seconds,
            "state_bytes": render.state_bytes(found), "sentence": render.sentence(found), "assumed": assumed,
        }  # fmt: skip
        print(json.dumps(told))
        return
    out.print(
        f"[bold]{model}[/] on {escape(measured.name)}, {shape.parameters / 1e9:,.2f} B parameters\n"
    )
    out.print(render.figures(found), "", render.where_table(found), "", sep="\n")
    out.print(*render.timeline(found, measured, out.width), sep="\n", no_wrap=True, crop=True)
    if assumed:
        out.print(f"\n[yellow]{assumed}[/]")


def measure(home: StateDir, device: str, threads: int, shared: Path | None) -> Hardware:
    """What this machine can do. Measured once, some ten seconds long, by one program at a time."""
    import torch

    if threads:
        torch.set_num_threads(threads)
    kind, _, number = device.partition(":")
    if kind == "cuda" and number.isdigit():
        torch.cuda.set_device(int(number))
    cache = (shared or home.path / "hardware.json").absolute()
    cache.parent.mkdir(parents=True, exist_ok=True)
    if not cache.exists():
        errors.print("Measuring this machine, once …")
    with FileLock(cache.with_suffix(".lock")):
        return probe(cache.parent, kind or None, cache)


def assumed_gpu(host: Hardware, flops: float, link: float, memory: int) -> Hardware:
    """The host with a GPU of these rates; what is not given is what such GPUs typically have."""
    return dataclasses.replace(
        host, device="cuda", name="an assumed GPU", device_memory=memory, dtype="bfloat16", matmul=((1024, flops),),
        attention=0.5 * flops, elementwise=700e9, to_device=link, from_device=link, products=(),
        attention_contexts=(), attention_heads=(), attention_backward=0.4 * flops, logits=(),
        updates=(*host.updates, *(UpdateRate("device", *form) for form in GPU_UPDATES)),
    )  # fmt: skip


def hardware_view(measured: Hardware) -> HardwareView:
    """For a coordinator: what a run would take on this machine. Names are shown to people."""
    name = "".join(c for c in measured.name if c.isprintable())[:80]
    return HardwareView.model_validate(dataclasses.asdict(measured) | {"name": name})
