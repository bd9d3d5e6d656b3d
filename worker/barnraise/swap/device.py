"""The device that computes, behind one seam: its choice, streams, events, pinning and memory.

Behind it are NVIDIA's GPUs with CUDA and AMD's with ROCm, which torch offers under the same names,
and the CPU, which has neither streams nor memory of its own. No other file names `torch.cuda`. What
torch offers for other accelerators (Apple's MPS, Intel's XPU) lacks registered memory or streams;
with these a machine trains on its CPU, and says so.
"""

import contextlib
import importlib.util
import os
import shutil
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from barnraise.errors import StateError

# Devices that torch names and that do not train here yet.
UNSUPPORTED = {"mps": "Apple's GPU (MPS)", "xpu": "Intel's GPU (XPU)"}
TRIAL_WIDTH = 64  # of the products that show whether a GPU computes at all
TRIAL_RANGE = 31  # of their integers: the products are exact, also with 11 bits (TF32)
SAME_CARD = "BARNRAISE_SAME_CARD"  # "1" lets tests name a device twice
LOST_CARDS = "BARNRAISE_LOST_CARDS"  # by name, with commas: a restarted worker leaves them out
CUDA_BUILDS = "https://download.pytorch.org/whl/cu130"  # PyTorch's builds for NVIDIA's GPUs
# Programs that come with the driver of a GPU, whether PyTorch can use it or not.
DRIVER_PROGRAMS = ("nvidia-smi", "amd-smi", "rocm-smi")

Stream = torch.cuda.Stream
StreamEvent = torch.cuda.Event


@dataclass(frozen=True)
class DeviceChoice:
    """The device that a worker trains on, or those that it may use together.

    Attributes:
        name: as torch names it: "cpu", "cuda" or "cuda:1".
        note: a sentence for people, why it is not the device that they might expect; "" otherwise.
        others: further devices.
    """

    name: str
    note: str = ""
    others: tuple[str, ...] = ()


# ---- choice --------------------------------------------------------------------------------------


def choose_device(requested: str = "") -> DeviceChoice:
    """Choose the device to train on.

    A GPU that cannot be used (too old for this PyTorch, taken by another program, broken) is
    replaced by the CPU, and an accelerator that is not supported too; the note says why and what
    would help.

    Args:
        requested: "cpu", "cuda" or "cuda:1", or several with commas; "" for all GPUs that can be
            used, or else the CPU.

    Raises:
        StateError: there is no device with this name, or it is named twice.
    """
    if "," in requested:
        return _choose_several([name.strip() for name in requested.split(",")])
    kind, _, number = requested.lower().partition(":")
    is_numbered = kind == "cuda" and number.isdecimal()
    if kind not in ("", "cpu", "cuda", *UNSUPPORTED) or (":" in requested and not is_numbered):
        raise StateError(
            f"there is no device '{requested}': write cpu, cuda, or cuda:1 for the second GPU"
        )
    if kind == "cpu":
        return DeviceChoice("cpu")
    if kind in UNSUPPORTED:
        return DeviceChoice("cpu", _unsupported_note(kind))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        if kind:
            raise StateError(f"there is no device '{requested}': {_explain_missing_gpu()}")
        return DeviceChoice("cpu", _note_without_gpu())
    if number and int(number) >= count:
        names = ", ".join(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(count))
        raise StateError(f"there is no device '{requested}': this machine has {names}")
    return _choose_usable([int(number or 0)] if kind else list(range(count)))


def _choose_several(names: list[str]) -> DeviceChoice:
    """Choose the devices that a list names, without those that cannot be used.

    Raises:
        StateError: there is no such device, or it is named twice.
    """
    choices = [choose_device(name) for name in names]
    found = [choice.name for choice in choices if not choice.note]
    twice = next((name for name in found if found.count(name) > 1), "")
    if twice and os.environ.get(SAME_CARD) != "1":
        raise StateError(f"'{twice}' is named twice in '{','.join(names)}': name each device once")
    return _without_lost(found or ["cpu"], [choice.note for choice in choices if choice.note])


def _choose_usable(candidates: list[int]) -> DeviceChoice:
    """Return the GPUs of the candidates that compute, or the CPU, with the reasons."""
    obstacles: list[str] = []
    usable: list[str] = []
    for index in candidates:
        name = f"cuda:{index}" if index else "cuda"
        if obstacle := find_obstacle(index):
            obstacles.append(obstacle)
        else:
            usable.append(name)
    if not usable:
        return DeviceChoice("cpu", f"Training on the CPU: {'; '.join(obstacles)}")
    return _without_lost(usable, obstacles)


def _without_lost(names: list[str], notes: list[str]) -> DeviceChoice:
    """Return the devices without those that this worker has lost, if others are left."""
    lost = os.environ.get(LOST_CARDS, "").split(",")
    left = [name for name in names if name not in lost]
    if left and len(left) < len(names):
        gone = ", ".join(name for name in names if name in lost)
        notes = [*notes, f"{gone} failed while it trained: training goes on without it"]
    first, *others = left or names
    return DeviceChoice(first, ". ".join(notes), tuple(others))


def _unsupported_note(kind: str) -> str:
    return f"Training on the CPU: {UNSUPPORTED[kind]} is not supported yet"


def _note_without_gpu() -> str:
    """Return a note if this machine seems to have an accelerator that will not be used."""
    if torch.backends.mps.is_available():
        return _unsupported_note("mps")
    if torch.xpu.is_available():
        return _unsupported_note("xpu")
    has_driver = any(shutil.which(program) for program in DRIVER_PROGRAMS)
    return f"Training on the CPU: {_explain_missing_gpu()}" if has_driver else ""


def _explain_missing_gpu() -> str:
    """Explain why torch offers no GPU, and what would help."""
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            "this PyTorch is built for CPUs only. The build for your GPU is installed by: "
            f"{install_command()}"
        )
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return _explain_failure(error)
    return "this machine has no GPU that PyTorch supports"


def install_command() -> str:
    """Return the command that installs the PyTorch build for a GPU where this worker runs.

    `uv tool install` makes environments without pip; uv itself finds the build for the driver.
    """
    if importlib.util.find_spec("pip") and not shutil.which("rocm-smi"):
        options = f"--force-reinstall torch --index-url {CUDA_BUILDS}"
        return f'"{sys.executable}" -m pip install {options}'
    options = "--reinstall-package torch --torch-backend=auto torch"
    return f'uv pip install --python "{sys.executable}" {options}'


def device_label(name: str) -> str:
    """Return what a GPU is called, as a shop would name it; "" for the CPU."""
    return torch.cuda.get_device_name(name) if has_streams(torch.device(name)) else ""


def find_obstacle(index: int) -> str:
    """Return why a GPU cannot compute and what would help; "" if it can.

    Products of small matrices are computed, because torch also lists GPUs that it has no kernels
    for, or that another program has taken. One is of integers, which every card and the CPU compute
    alike to the bit: it goes to the card and comes back, as weights and gradients will.
    """
    name = f"cuda:{index}"
    numbers = torch.arange(float(TRIAL_WIDTH**2)).view(TRIAL_WIDTH, TRIAL_WIDTH) % TRIAL_RANGE
    try:
        x = torch.ones(TRIAL_WIDTH, TRIAL_WIDTH, device=name)
        total = float((x @ x).sum())
        copy = numbers.to(x.device)
        is_right = torch.equal((copy @ copy).cpu(), numbers @ numbers)
        label = torch.cuda.get_device_name(index)
    except (RuntimeError, AssertionError) as error:
        return f"{name} cannot be used: {_explain_failure(error, index)}"
    if total != float(TRIAL_WIDTH**3) or not is_right:
        return f"{name} ({label}) computes wrong results: it is broken, overheated or overclocked"
    return ""


def computes_bfloat16(device: str) -> bool:
    """Return whether a device multiplies matrices in bfloat16 at all; old GPUs raise an error."""
    try:
        x = torch.ones(TRIAL_WIDTH, TRIAL_WIDTH, device=device, dtype=torch.bfloat16)
        return float((x @ x)[0, 0]) == float(TRIAL_WIDTH)
    except RuntimeError:
        return False


# What a failure of CUDA says, and what it means for a user.
EXPLANATIONS = (
    (
        ("no kernel image", "not compatible with the current"),
        "it is too old for this PyTorch{arch}; an installation of PyTorch for an older version of "
        "CUDA may support it",
    ),
    (
        ("driver version is insufficient", "driver on your system is too old"),
        "the GPU's driver is too old for this PyTorch: update the driver",
    ),
    (("no nvidia driver", "no cuda-capable device"), "no GPU, or no driver of one, is installed"),
    (
        ("busy or unavailable", "exclusive", "device is in use"),
        "another program has it to itself: end that program, or wait for it",
    ),
    (
        ("out of memory", "out_of_memory"),
        "other programs have taken all of its memory: end one of them",
    ),
    (
        ("ecc error", "uncorrectable"),
        "its memory has errors: restart the machine; if that does not help, the card is broken",
    ),
)


def _explain_failure(error: BaseException, index: int | None = None) -> str:
    """Return what an error of torch's means for a user, or its first line."""
    text = str(error)
    for signs, meaning in EXPLANATIONS:
        if any(sign in text.lower() for sign in signs):
            return meaning.format(arch=_describe_generation(index))
    return text.strip().splitlines()[0] if text.strip() else type(error).__name__


def _describe_generation(index: int | None) -> str:
    """Describe a GPU's generation and those that this PyTorch has kernels for, in brackets."""
    if index is None:
        return ""
    with contextlib.suppress(RuntimeError, AssertionError):
        major, minor = torch.cuda.get_device_capability(index)
        built_for = " ".join(torch.cuda.get_arch_list())
        return f" (the card is sm_{major}{minor}; this PyTorch is for {built_for})"
    return ""


# What errors of a GPU's libraries have in common, and those of them that are of memory.
DEVICE_ERRORS = ("cuda error", "hip error", "cuda driver error", "cudnn error")
DEVICE_MEMORY_ERRORS = ("out of memory", "alloc_failed")


def is_device_memory_error(error: BaseException) -> bool:
    """Return whether an error says that a GPU's memory did not suffice."""
    text = str(error).lower()
    is_of_device = any(sign in text for sign in DEVICE_ERRORS)
    return isinstance(error, torch.OutOfMemoryError) or (
        is_of_device and any(sign in text for sign in DEVICE_MEMORY_ERRORS)
    )


def is_device_lost(error: BaseException) -> bool:
    """Return whether an error says that a GPU, or this process's context on it, is gone.

    Sleep, a reset or an update of its driver, a fault of the card and a pulled cable do this. All
    later calls in the process fail.
    """
    is_of_device = any(sign in str(error).lower() for sign in DEVICE_ERRORS)
    return isinstance(error, RuntimeError) and is_of_device and not is_device_memory_error(error)


# ---- streams and events --------------------------------------------------------------------------


def has_streams(device: torch.device | None) -> bool:
    """Whether work is submitted to a device's streams; the CPU computes in the calling thread."""
    return device is not None and device.type == "cuda"


def require_determinism() -> None:
    """Let a GPU's kernels give the same bits each time, or raise an error if one cannot.

    `configure_torch_environment` has given cuBLAS the workspaces that this needs.
    """
    torch.use_deterministic_algorithms(True)
    # What a kernel leaves unwritten is never read; to fill it would take as long as a kernel.
    settings: Any = torch.utils.deterministic  # a module whose switches have no annotation
    settings.fill_uninitialized_memory = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def use_device(device: torch.device | str | None) -> AbstractContextManager[object]:
    """Return a context in which a GPU is this thread's current one.

    Each thread begins with the first one, and torch's copies and events touch the current one.
    """
    resolved = torch.device(device) if isinstance(device, str) else device
    if resolved is None or not has_streams(resolved) or not resolved.index:
        return contextlib.nullcontext()
    return torch.cuda.device(resolved)


def select_device(device: torch.device) -> None:
    """Make a GPU this thread's current one from now on."""
    if has_streams(device) and device.index is not None:
        torch.cuda.set_device(device)


def new_stream(device: torch.device) -> Stream:
    """Return a new stream of a GPU."""
    return torch.cuda.Stream(device)


def current_stream(device: torch.device) -> Stream:
    """Return the stream to which this thread submits its work for a GPU."""
    return torch.cuda.current_stream(device)


def use_stream(stream: Stream) -> AbstractContextManager[object]:
    """Return a context in which this thread submits its work to a stream."""
    return torch.cuda.stream(stream)


def record_event(stream: Stream) -> StreamEvent:
    """Return an event that a stream records after everything submitted to it so far.

    A thread that waits for it sleeps: one that spins takes a core from Adam or the kernels' launch.
    """
    event = torch.cuda.Event(enable_timing=False, blocking=True)
    event.record(stream)
    return event


def synchronize(device: str) -> None:
    """Wait until a device has done everything that was submitted to it."""
    if has_streams(torch.device(device)):
        torch.cuda.synchronize(device)


# ---- memory --------------------------------------------------------------------------------------


def register_host_memory(address: int, size: int) -> int:
    """Pin pages of this process, so that copies of them run alongside a GPU's kernels.

    Returns:
        0, or the driver's error number if the system refuses.
    """
    status = int(_cuda_runtime().cudaHostRegister(address, size, 0))
    if status:
        _clear_last_error()
    return status


def _clear_last_error() -> None:
    """Clear the error that a refused call leaves in this thread's CUDA state.

    The next kernel would report it as its own. torch offers no cudaGetLastError, but calls it when
    it launches a kernel: this one fails in place of a later one.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


def unregister_host_memory(address: int) -> None:
    """Unpin pages that were registered."""
    _cuda_runtime().cudaHostUnregister(address)


def _cuda_runtime() -> Any:
    """Return CUDA's runtime library, which torch loads but does not annotate.

    Under ROCm it has the same names.
    """
    return torch.cuda.cudart()


def total_memory(device: str) -> int:
    """Return the bytes of a device's own memory; 0 for the CPU."""
    if not has_streams(torch.device(device)):
        return 0
    return int(torch.cuda.get_device_properties(device).total_memory)


def free_memory(device: str) -> int:
    """Return the bytes of a device's memory that no program takes; 0 for the CPU.

    CUDA's context of this process is in place afterwards, so it is not part of them.
    """
    if not has_streams(torch.device(device)):
        return 0
    torch.cuda.empty_cache()  # what torch's allocator holds and nobody uses is free as well
    return int(torch.cuda.mem_get_info(device)[0])


def release_device_memory(device: torch.device) -> None:
    """Return to a GPU the memory that torch's allocator holds but nobody uses."""
    if has_streams(device):
        torch.cuda.empty_cache()


def limit_memory(device: str, size: int | None) -> None:
    """Make torch's allocator refuse to take more than `size` bytes of a GPU's memory."""
    total = total_memory(device)
    if total and size is not None:
        # Unlike its siblings this function refuses "cuda": it wants a number.
        index = torch.device(device).index
        index = torch.cuda.current_device() if index is None else index
        torch.cuda.set_per_process_memory_fraction(min(1.0, size / total), index)
