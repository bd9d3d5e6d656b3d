"""Measure in ten minutes what a GPU says about the swap engine: `make bench-gpu`.

    python3 benchmarks/swap/gpu_first.py                      # the first call: nine minutes at most
    python3 benchmarks/swap/gpu_first.py --call second        # 2.7B, FSDP2 on it, more plans
    python3 benchmarks/swap/gpu_first.py --call third         # the study with 32 M parameters
    python3 benchmarks/swap/gpu_first.py --call twice         # one card that is used twice
    python3 benchmarks/swap/gpu_first.py --call two           # two cards, and ranks on them
    python3 benchmarks/swap/gpu_first.py --part exact         # one part
    python3 benchmarks/swap/gpu_first.py --device cpu --tiny  # shows that the script runs

It needs Python, torch and numpy, and runs in a bare checkout without a network; `swarm` and `study`
need the worker's packages as well, and `torchao` needs torchao. The parts follow each other, the
most valuable first. Each is a process of its own with a time limit: what one breaks (memory, the
GPU's context) is whole again for the next. Each part is one line of JSON, printed when it ends and
appended to $OUT/gpu_first.jsonl, with all rows that it had until then.
"""

import argparse
import contextlib
import datetime
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDERS = [str(ROOT / "worker"), str(HERE)]
sys.path[:0] = [folder for folder in FOLDERS if folder not in sys.path]

GB = 10**9
Row = dict[str, Any]

# The parts of each call, the most valuable first, and the seconds that each may take. Those of the
# first call took 485 s together on an H200 with 16 cores.
CALLS = {
    "first": {
        "environment": 60,
        "smoke": 60,
        "exact": 120,
        "memory": 100,
        "speed": 150,
        "swarm": 100,
        "fsdp2": 80,
        "torchao": 60,
        "plain": 40,
    },
    "second": {"speed_2.7b": 200, "fsdp2_2.7b": 150, "choices": 180},
    "third": {"study": 560},
    "twice": {"one_card_twice": 120},
    "two": {"two_cards": 500},
}
CALL_SECONDS = 540.0
TINY_PATIENCE = 10.0  # a tiny session is no measurement and may run on a busy machine
LEAST_SECONDS = 10.0  # a part with less time left is not started
# Dense bf16 FLOP/s by the vendor's sheet, by a part of the card's name.
PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "4090": 165e12,
    "3090": 71e12,
}


@dataclass(frozen=True)
class Session:
    """How the parts run: on a GPU, or on the CPU with tiny models."""

    device: str
    tiny: bool

    @property
    def has_gpu(self) -> bool:
        """Whether there is a GPU to measure."""
        return self.device != "cpu"


# ---- environment ---------------------------------------------------------------------------------


def measure_environment(session: Session) -> Iterator[Row]:
    """Describe the GPU and measure what everything else depends on."""
    import torch

    yield {"python": sys.version.split()[0], "torch": torch.__version__, "cores": os.cpu_count()}
    if not session.has_gpu:
        return
    free, total = torch.cuda.mem_get_info()
    yield {
        "gpu": torch.cuda.get_device_name(),
        "capability": torch.cuda.get_device_capability(),
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "total": total,
        "free_with_context": free,
    }
    yield from _measure_products()
    yield from _measure_pinning()


def _measure_products() -> Iterator[Row]:
    import torch

    width = 8192
    for dtype in (torch.bfloat16, torch.float32):
        free = torch.cuda.mem_get_info()[0]
        x = torch.randn(width, width, device="cuda", dtype=dtype)
        for _ in range(3):
            x @ x
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(10):
            x @ x
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        yield {
            "dtype": str(dtype),
            "flops": 10 * 2 * width**3 / seconds,
            "workspaces": torch.cuda.memory_reserved() - 2 * x.nbytes,
            "taken_besides": free - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved(),
        }
        del x
        torch.cuda.empty_cache()


def _measure_pinning() -> Iterator[Row]:
    """Register and copy growing buffers, as the engine does with its state in RAM."""
    import torch

    from barnraise.swap.arena import Arena

    for size in (GB, 8 * GB, 32 * GB):
        arena = Arena(pins=True)
        started = time.perf_counter()
        try:
            host = arena.allocate(size, crosses_link=True)
        except Exception as error:
            yield {"allocated": size, "failure": _first_line(error)}
            return
        seconds = time.perf_counter() - started
        part = host[: GB // 2]
        target = torch.empty(part.numel(), dtype=torch.uint8, device="cuda")
        rates = []
        for source, destination in ((part, target), (target, part)):
            torch.cuda.synchronize()
            started_copy = time.perf_counter()
            destination.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            rates.append(part.numel() / (time.perf_counter() - started_copy))
        yield {
            "allocated": size,
            "pinned": arena.pinned,
            "seconds": seconds,
            "to_device": rates[0],
            "back": rates[1],
        }
        del host, part
        arena.close()


# ---- plans of a tiny model -----------------------------------------------------------------------


def build_tiny_plan(session: Session, resident: int = 0, cuts: int = -1, **changes: Any) -> Any:
    """Return a plan of a tiny model, staged through the device.

    Args:
        session: how the parts run.
        resident: fragments whose training state is on the GPU: the ends first, then the top blocks.
        cuts: the grouping, as `bitwise.group_blocks` numbers it.
        **changes: other fields of the plan.
    """
    import bitwise

    from barnraise.planning.plan import Plan, tile_elements
    from barnraise.spec import ModelSpec

    model = ModelSpec(layers=6, width=128, heads=2, context=64, vocabulary=512)
    last = model.layers + 1
    near = set([0, last, *range(model.layers, 0, -1)][:resident]) if session.has_gpu else set()
    tiers = tuple("device" if i in near else "host" for i in range(last + 1))
    forward = bitwise.group_blocks(model.layers, cuts)
    largest = max(len(group) for group in forward)
    plan = Plan(
        model=model,
        device=session.device,
        threads=2,
        staged=True,
        sequences=2,
        micro_batches=3,
        forward_groups=forward,
        backward_groups=forward[::-1],
        kept_inputs="block" if largest == 1 else "group",
        weights=tiers,
        moments=tiers,
        slots=min(2 * largest + 1, model.layers - len(near - {0, last})),
        gradient_slots=largest + 1,
        host_gradient_slots=model.layers,
        tile=tile_elements(model, whole=True),
        ring=0,
    )
    plan = replace(plan, **changes)
    plan.validate()
    return plan


def list_smoke_plans(session: Session) -> dict[str, Any]:
    """Return a plan of each kind that the planner makes."""
    import bitwise

    kinds: dict[str, dict[str, Any]] = {
        "memory": {},
        "memory bf16": {"dtype": "bfloat16"},
        "layer clipping": {"clipping": "layer"},
        "resident": {"resident": 8},
        "resident bf16": {"resident": 8, "dtype": "bfloat16"},
        "graphs retained": {"resident": 8, "retained_blocks": 3},
        "some resident, 8 bits": {"resident": 4, "dtype": "bfloat16", "moments_bits": 8},
        "boundaries in RAM": {"boundaries": "host"},
        "groups of two": {"cuts": 0b01010},
    }
    if not session.has_gpu:
        del kinds["graphs retained"], kinds["boundaries in RAM"]
    plans = {name: build_tiny_plan(session, **changes) for name, changes in kinds.items()}
    staged = build_tiny_plan(session)
    for safety in ("exact", "restart"):
        plans[f"disk {safety}"] = bitwise.plan_on_disk(
            staged, restart=safety == "restart", staged=True
        )
    return plans


@dataclass(frozen=True)
class OtherUpdate:
    """Another machine's update, the same number everywhere."""

    sizes: list[int]
    header: str = "another machine's"

    def decode(self, index: int) -> Any:
        """Return fragment `index`'s int32 units."""
        import torch

        return torch.full((self.sizes[index],), 100, dtype=torch.int32)


def run_smoke(session: Session) -> Iterator[Row]:
    """Run everything that a worker does with each kind of plan, and name what fails."""
    for name, plan in list_smoke_plans(session).items():
        progress = [f"{name}: open"]
        started = time.perf_counter()
        try:
            with tempfile.TemporaryDirectory() as folder:
                result = _exercise(plan, Path(folder) if plan.on_disk else None, progress)
            yield {"plan": name, **result, "seconds": time.perf_counter() - started}
        except Exception as error:
            traceback.print_exc()
            yield {"plan": name, "failed_at": progress[-1], "failure": _first_line(error)}


def _exercise(plan: Any, folder: Path | None, progress: list[str]) -> Row:
    """Train, exchange, evaluate, save and load under a plan; `progress` lists what was begun."""
    import bitwise
    import torch

    with contextlib.closing(bitwise.open_engine(plan, folder)) as engine:
        sizes = [fragment.size for fragment in plan.fragments]
        progress.append("train")
        losses = bitwise.train(engine, 2)
        progress.append("apply an update")
        engine.queue_updates(OtherUpdate(sizes), prediction=(0.5,) * len(sizes))
        losses += bitwise.train(engine, 1, first=2)
        progress.append("end the round")
        for part in engine.end_round(lambda units: (b"", units.clone()), 1.0):
            del part
        progress.append("evaluate")
        shape = (8, plan.model.context + 1)
        validation = engine.evaluate([torch.zeros(shape, dtype=torch.int64)])
        if folder is not None:
            progress.append("commit")
            engine.commit(closing=True)
        else:
            progress.append("save")
            state = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
            progress.append("load")
            engine.load_state_dict(state)
        losses += bitwise.train(engine, 1, first=3)
        progress.append("close")
    return {"losses": [round(loss, 6) for loss in losses], "validation": round(validation, 5)}


def compare_bits(session: Session) -> Iterator[Row]:
    """Compare swapped runs with unswapped ones to the bit, where updates are made in one place.

    First with torch's deterministic kernels, then with those that it chooses. Losses of the CPU are
    compared within rounding.
    """
    import torch

    from barnraise.swap.device import require_determinism

    steps = 3 if session.tiny else 8
    for deterministic in (True, False) if session.has_gpu else (False,):
        if deterministic:
            require_determinism()
        else:
            torch.use_deterministic_algorithms(False)
        for dtype in ("float32", "bfloat16"):
            for clipping in ("exact", "layer"):
                base = {"dtype": dtype, "clipping": clipping, "deterministic": deterministic}
                for row in _compare_plans(session, base, steps):
                    yield base | row


def _compare_plans(session: Session, base: dict[str, Any], steps: int) -> Iterator[Row]:
    import bitwise

    reference = bitwise.run_plan(build_tiny_plan(session, **base), steps)
    variants: dict[str, dict[str, Any]] = {
        "again": {},
        "groups": {"cuts": 0b10101},
        "all slots": {"slots": 6},
        "few slots": {"slots": 2},
    }
    if session.has_gpu:
        variants["boundaries in RAM"] = {"boundaries": "host"}
    for name, changes in variants.items():
        run = bitwise.run_plan(build_tiny_plan(session, **base, **changes), steps)
        yield {"variant": name, "same_bits": bitwise.equal_bits(run, reference)}
    if not session.has_gpu:
        return
    resident = bitwise.run_plan(build_tiny_plan(session, resident=8, **base), steps)
    retained = build_tiny_plan(session, resident=8, retained_blocks=4, **base)
    same = bitwise.equal_bits(bitwise.run_plan(retained, steps), resident)
    yield {"variant": "graphs retained", "same_bits": same}
    cpu = bitwise.run_plan(build_tiny_plan(replace(session, device="cpu"), **base), steps)
    for name, run in (("CPU", cpu), ("updates on the GPU", resident)):
        differences = [abs(a - b) for a, b in zip(run[0], reference[0], strict=True)]
        yield {"variant": name, "largest_difference_of_losses": max(differences)}


# ---- real models ---------------------------------------------------------------------------------


def measure_machine(session: Session) -> Any:
    """Measure the machine once a call; a tiny session has given rates."""
    from barnraise.planning.hardware import Hardware, memory_bytes
    from barnraise.swap.hardware_probe import probe

    if not session.tiny:
        return probe(_hardware_file().parent, session.device, _hardware_file())
    return Hardware(
        device=session.device,
        name="a machine with given rates",
        cores=2,
        memory=memory_bytes(),
        device_memory=0,
        disk=10 * GB,
        dtype="float32",
        matmul=((256, 5e10),),
        attention=2e10,
        elementwise=1e10,
        to_device=1e10,
        from_device=1e10,
        stream=1e10,
        adam=5e8,
        disk_read=1e9,
        disk_write=1e9,
    )


def _hardware_file() -> Path:
    """Return the file with the machine's measurements, which the parts of a call share."""
    return Path(os.environ.get("OUT") or tempfile.gettempdir()) / "gpu_first_hardware.json"


def open_large_engine(plan: Any, folder: Path | None, ranks: Any = None) -> Any:
    """Return an engine, perhaps on a group of ranks, whose weights do not take minutes to draw."""
    import bitwise
    import torch

    from barnraise.spec import UNIT_BITS, Recipe
    from barnraise.swap.engine import Engine
    from barnraise.swap.state_store import FragmentSequence, StateStore

    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(1 << 20, generator=generator)
    store = StateStore(plan, folder)
    anchor = FragmentSequence(store, "anchor")
    for fragment in plan.fragments:
        units = torch.zeros(fragment.size, dtype=torch.int32)
        for slot in fragment.slots:
            target = units[slot.offset : slot.offset + slot.size]
            if slot.initial == "ones":
                target.fill_(1 << UNIT_BITS)
            elif slot.initial == "normal":
                for chunk in target.split(1 << 20):
                    chunk.copy_(normal[: chunk.numel()] * slot.deviation)
        anchor[fragment.index] = units
    recipe = Recipe(learning_rate=1e-5)
    if ranks is not None:
        from barnraise.swap.sharded.sharded_engine import ShardedEngine

        return ShardedEngine(plan, recipe, store, bitwise.HeaderRecorder(), ranks)
    return Engine(plan, recipe, store, bitwise.HeaderRecorder(), lambda progress: "")


def sample_batches(plan: Any) -> list[Any]:
    """Return the micro-batches of one step, of random tokens."""
    import torch

    sequences = plan.sequences * plan.micro_batches
    shape = (sequences, plan.model.context + 1)
    return list(torch.randint(plan.model.vocabulary, shape).split(plan.sequences))


def measure_memory(session: Session) -> Iterator[Row]:
    """Measure what torch gives out and holds, and what the card loses, next to the plan."""
    cases = (("gpt2-124m", 2.5), ("gpt2-355m", 4.0), ("gpt3-1.3b", 8.0))
    hardware = measure_machine(session)
    for name, cap in (("gpt-nano", 0.1),) if session.tiny else cases:
        row: Row = {"model": name, "cap_gb": cap}
        try:
            for phase in _measure_phases(session, hardware, name, int(cap * GB)):
                row |= phase
        except Exception as error:
            traceback.print_exc()
            row["failure"] = _first_line(error)
        _release(session)
        yield row


def _measure_phases(session: Session, hardware: Any, name: str, cap: int) -> Iterator[Row]:
    """Yield the peaks of the steps, of folding an update in and of the validation."""
    import torch

    from barnraise.planning.limits import Limits
    from barnraise.planning.memory_model import HELD_OUT
    from barnraise.planning.search import make_plan
    from barnraise.spec import preset
    from barnraise.swap.device import limit_memory

    limits = Limits(device_memory=cap)
    plan = make_plan(hardware, preset(name), limits, 8, advise=False)
    limit_memory(session.device, cap)
    yield {"planned": plan.device_bytes, "plan": _describe(plan)}
    with tempfile.TemporaryDirectory() as folder:
        engine = open_large_engine(plan, Path(folder) if plan.on_disk else None)
        sizes = [fragment.size for fragment in plan.fragments]
        held_out = torch.randint(plan.model.vocabulary, (HELD_OUT, plan.model.context + 1))

        def apply_update() -> None:
            engine.queue_updates(OtherUpdate(sizes))
            engine.step(sample_batches(plan))
            engine.apply_queued()

        phases: dict[str, Callable[[], object]] = {
            "steps": lambda: [engine.step(sample_batches(plan)) for _ in range(3)],
            "apply": apply_update,
            "evaluate": lambda: engine.evaluate([held_out]),
            "state": lambda: None if plan.on_disk else engine.state_dict(),
        }
        for phase, call in phases.items():
            yield {phase: _measure_peak(session, call, plan.device_bytes)}
        engine.close()


def _measure_peak(session: Session, call: Callable[[], object], planned: int) -> Row:
    import torch

    if not session.has_gpu:
        call()
        return {"allocated": 0}
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    allocated = torch.cuda.max_memory_allocated()
    return {
        "allocated": allocated,
        "reserved": torch.cuda.max_memory_reserved(),
        "card": total - free,
        "over_plan": round(allocated / planned - 1, 4),
    }


def measure_speed(session: Session) -> Iterator[Row]:
    """Measure tokens/s of 1.3B under caps, each plan as the planner made it."""
    if session.tiny:
        yield from _measure_speeds(session, "gpt-nano", 4, (100_000_000,))
    else:
        yield from _measure_speeds(session, "gpt3-1.3b", 16, (24 * GB, 8 * GB, None))


def measure_large_speed(session: Session) -> Iterator[Row]:
    """Measure tokens/s of 2.7B under caps."""
    yield from _measure_speeds(session, "gpt3-2.7b", 16, (24 * GB, 12 * GB, None))


def measure_choices(session: Session) -> Iterator[Row]:
    """Measure plans with other clipping, moments and crash safety than the planner chooses."""
    changes = ({"clipping": "layer"}, {"moments_bits": 8}, {"precision": "float32"})
    for fields in changes:
        yield from _measure_speeds(session, "gpt3-1.3b", 16, (8 * GB,), **fields)
    yield from _measure_speeds(session, "gpt2-124m", 8, (None,))


def _measure_speeds(
    session: Session, name: str, sequences: int, caps: tuple[int | None, ...], **fields: Any
) -> Iterator[Row]:
    hardware = measure_machine(session)
    for cap in caps:
        row: Row = {"model": name, "cap": cap, **fields}
        try:
            row |= _train_as_planned(session, hardware, (name, sequences), cap, fields)
        except Exception as error:
            traceback.print_exc()
            row["failure"] = _first_line(error)
        _release(session)
        yield row


def _train_as_planned(
    session: Session,
    hardware: Any,
    work: tuple[str, int],
    cap: int | None,
    fields: dict[str, Any],
) -> Row:
    """Train some steps; `work` is the model and the sequences of a step."""
    import torch

    from barnraise.planning.limits import Limits
    from barnraise.planning.search import make_plan
    from barnraise.spec import preset
    from barnraise.swap.device import limit_memory, total_memory

    name, sequences = work
    model = preset(name)
    limits = Limits(device_memory=cap, **fields)
    plan = make_plan(hardware, model, limits, sequences, advise=False)
    limit_memory(session.device, cap or total_memory(session.device))
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        engine = open_large_engine(plan, Path(folder) if plan.on_disk else None)
        opened = time.perf_counter() - started
        seconds: list[float] = []
        for _ in range(3 if session.tiny else 6):
            started = time.perf_counter()
            engine.step(sample_batches(plan))
            seconds.append(time.perf_counter() - started)
        busy = _profile_step(engine, plan) if session.has_gpu else {}
        engine.close()
    rate = sequences * model.context / median(seconds[1:])
    peak = next((flops for part, flops in PEAK_FLOPS.items() if part in hardware.name), None)
    flops = 6 * model.parameters * rate
    row = {
        "tokens_per_second": rate,
        "predicted": sequences * model.context / plan.step_seconds,
        "tflops": flops / 1e12,
        "mfu": flops / peak if peak else None,
        "opened": opened,
        "seconds": [round(each, 4) for each in seconds],
        "plan": _describe(plan),
        **busy,
    }
    if session.has_gpu:
        row["allocated"] = torch.cuda.max_memory_allocated()
        row["reserved"] = torch.cuda.max_memory_reserved()
    return row


def _profile_step(engine: Any, plan: Any) -> Row:
    """Return the share of a step in which kernels run, and the longest kernels."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as record:
        started = time.perf_counter()
        engine.step(sample_batches(plan))
        engine.executor.drain()
        seconds = time.perf_counter() - started
    averages: list[Any] = list(record.key_averages())
    kernels = sorted(averages, key=lambda kernel: -kernel.self_device_time_total)
    computing = [kernel for kernel in kernels if "Memcpy" not in kernel.key]
    return {
        "busy": sum(kernel.self_device_time_total for kernel in computing) / 1e6 / seconds,
        "kernels": [
            (kernel.key[:60], kernel.count, round(kernel.self_device_time_total / 1e3, 2))
            for kernel in kernels[:12]
        ],
    }


def _describe(plan: Any) -> Row:
    names = (
        *("dtype", "sequences", "micro_batches", "clipping", "boundaries", "kept_inputs"),
        *("near_inputs", "slots", "host_gradient_slots"),
        *("retained_blocks", "crash_safety", "bottleneck", "moments_bits", "step_seconds"),
        *("device_bytes", "host_bytes", "written_per_step"),
    )
    resident = plan.weights.count("device")
    return {name: getattr(plan, name) for name in names} | {"resident": resident}


def _release(session: Session) -> None:
    """Free the memory of the engine before."""
    gc.collect()
    if session.has_gpu:
        import torch

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# ---- several cards -------------------------------------------------------------------------------


def compare_one_card_twice(session: Session) -> Iterator[Row]:
    """Compare several devices on one card with the same deal done in turns."""
    import several_cards

    plan = build_tiny_plan(session)
    yield from several_cards.compare_one_card_twice(plan, 3 if session.tiny else 8)


def measure_two_cards(session: Session) -> Iterator[Row]:
    """Measure two cards against one, and ranks on them against plain FSDP2."""
    import several_cards
    import torch

    from barnraise.spec import preset
    from barnraise.swap.hardware_probe import probe

    first = second = measure_machine(session)
    if session.has_gpu:
        if torch.cuda.device_count() < several_cards.RANKS:
            yield {"failure": "this machine has one GPU"}
            return
        second = probe(_hardware_file().parent, "cuda:1", _hardware_file().with_suffix(".1.json"))
    model, steps = preset("gpt-nano" if session.tiny else "gpt3-1.3b"), 3 if session.tiny else 6
    both = replace(first, others=(second,))
    yield from several_cards.measure_two_cards(both, model, 8, steps, open_large_engine)


# ---- other systems -------------------------------------------------------------------------------


def measure_plain(session: Session) -> Iterator[Row]:
    """Train in torch alone with everything on the GPU: autocast, fused AdamW, recomputed blocks."""
    yield _measure_baseline(session, "plain", "gpt3-1.3b", None)


def measure_fsdp2(session: Session) -> Iterator[Row]:
    """Train with FSDP2's CPUOffloadPolicy within 24 GB, and within 8."""
    for cap in (24 * GB, 8 * GB):
        yield _measure_baseline(session, "fsdp2", "gpt3-1.3b", cap)
        if session.tiny:
            return


def measure_large_fsdp2(session: Session) -> Iterator[Row]:
    """Train 2.7B with FSDP2's CPUOffloadPolicy within 24 GB."""
    yield _measure_baseline(session, "fsdp2", "gpt3-2.7b", 24 * GB)


def measure_torchao(session: Session) -> Iterator[Row]:
    """Train with torchao's CPUOffloadOptimizer within 24 GB."""
    yield _measure_baseline(session, "torchao", "gpt3-1.3b", 24 * GB)


def _measure_baseline(session: Session, baseline: str, name: str, cap: int | None) -> Row:
    """Measure a baseline with micro-batches of four sequences and steps of sixteen."""
    import cuda_baseline
    import torch

    from barnraise.spec import preset
    from barnraise.swap.device import limit_memory, total_memory

    model = preset("gpt-nano" if session.tiny else name)
    row: Row = {"baseline": baseline, "model": name, "cap": cap}
    limit_memory(session.device, cap or total_memory(session.device))
    training = cuda_baseline.GpuTraining(
        model, 4, 1 if session.tiny else 4, 2 if session.tiny else 5, session.device
    )
    try:
        row |= cuda_baseline.measure(baseline, training)
        row["tflops"] = 6 * model.parameters * row["tokens_per_second"] / 1e12
    except Exception as error:
        traceback.print_exc()
        row["failure"] = _first_line(error)
    if session.has_gpu:
        row["allocated"] = torch.cuda.max_memory_allocated()
        row["reserved"] = torch.cuda.max_memory_reserved()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    _release(session)
    return row


def run_swarm(session: Session) -> Iterator[Row]:
    """Let two workers on the GPU and one on the CPU train one model; needs the packages."""
    if missing := _missing_package("pydantic", "blake3", "iroh", "psutil"):
        yield {"failure": f"the workers need the package {missing}, which is not installed"}
        return
    program = HERE.parent / "drills" / "drill_gpu.py"
    arguments = ["--device", session.device, "--hardware", str(_hardware_file())]
    if session.tiny:
        arguments += ["--seconds", "10", "--width", "64"]
    paths = [str(ROOT / "worker"), str(HERE.parent / "shared"), os.environ.get("PYTHONPATH", "")]
    drill = subprocess.Popen(
        [sys.executable, str(program), *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert drill.stdout is not None
    line = ""
    for line in drill.stdout:
        print(line, end="", flush=True)  # what is there until the time is over
    if drill.wait():
        sys.exit(f"the drill ended with status {drill.returncode}")
    yield json.loads(line)


def _missing_package(*packages: str) -> str:
    """Return the first of the packages that is not installed, "" if all are."""
    for name in packages:
        try:
            __import__(name)
        except ImportError:
            return name
    return ""


def run_study(session: Session) -> Iterator[Row]:
    """Train the exchange study's long cases with 32 M parameters; needs the project's packages."""
    if missing := _missing_package("pydantic", "blake3"):
        yield {"failure": f"the study needs the package {missing}, which is not installed"}
        return
    program = HERE.parent / "study" / "study_exchange.py"
    environment = os.environ | {"BARNRAISE_STUDY": "large"}
    arguments = ["--quick"] if session.tiny else []
    study = subprocess.run([sys.executable, str(program), *arguments], env=environment, check=False)
    yield {"status": study.returncode}


PARTS: dict[str, Callable[[Session], Iterator[Row]]] = {
    "environment": measure_environment,
    "smoke": run_smoke,
    "exact": compare_bits,
    "memory": measure_memory,
    "speed": measure_speed,
    "plain": measure_plain,
    "fsdp2": measure_fsdp2,
    "speed_2.7b": measure_large_speed,
    "fsdp2_2.7b": measure_large_fsdp2,
    "torchao": measure_torchao,
    "choices": measure_choices,
    "one_card_twice": compare_one_card_twice,
    "two_cards": measure_two_cards,
    "swarm": run_swarm,
    "study": run_study,
}


# ---- processes -----------------------------------------------------------------------------------

ROW_MARK = "ROW "


def run_part(part: str, session: Session) -> None:
    """Run a part in this process and print each row as soon as it is there."""
    for row in PARTS[part](session):
        print(ROW_MARK + json.dumps(row, default=str), flush=True)


def start_part(part: str, session: Session, seconds: float) -> Row:
    """Run a part in a process of its own, and end it when its time is over.

    Returns:
        The part's rows, and why it ended early if it did.
    """
    from barnraise.swap.torch_environment import configure_torch_environment

    command = [sys.executable, str(Path(__file__).resolve()), "--in-process", part]
    command += ["--device", session.device, *(["--tiny"] if session.tiny else [])]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    configure_torch_environment(environment)
    started = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        failure = ""
        try:
            status = process.wait(seconds)
            failure = f"ended with status {status}" if status else ""
        except subprocess.TimeoutExpired:
            failure = f"not finished after {seconds:.0f} s"
        finally:
            _end_group(process)
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()
    rows = [json.loads(line[len(ROW_MARK) :]) for line in lines if line.startswith(ROW_MARK)]
    result: Row = {"part": part, "seconds": round(time.monotonic() - started, 1), "rows": rows}
    if failure:
        others = [line for line in lines if not line.startswith(ROW_MARK)]
        result |= {"failure": failure, "output": others[-12:]}
    return result


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """End a process and all that it started."""
    with contextlib.suppress(ProcessLookupError):  # all of them have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:400]


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--call", choices=CALLS, default="first", help="which parts")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this; repeatable")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script")
    parser.add_argument("--tiny", action="store_true", help="tiny models")
    parser.add_argument("--seconds", type=float, default=CALL_SECONDS, help="for all parts")
    parser.add_argument("--in-process", choices=PARTS, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Run the parts of a call one after the other, and write each one's line."""
    arguments = parse_arguments()
    session = Session(arguments.device, arguments.tiny)
    if arguments.in_process:
        run_part(arguments.in_process, session)
        return
    limits = {part: seconds for call in CALLS.values() for part, seconds in call.items()}
    folder = Path(os.environ.get("OUT") or ".")
    patience = TINY_PATIENCE if session.tiny else 1.0
    deadline = time.monotonic() + patience * arguments.seconds
    for part in arguments.part or CALLS[arguments.call]:
        left = deadline - time.monotonic()
        if left < LEAST_SECONDS:
            result: Row = {"part": part, "failure": "no time left"}
        else:
            result = start_part(part, session, min(patience * limits[part], left))
        result["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
        line = json.dumps(result)
        print(line, flush=True)
        with (folder / "gpu_first.jsonl").open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
