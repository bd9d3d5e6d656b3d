"""The device is chosen with a sentence for everything that is not as a user might expect."""

import contextlib
import re
import sys
import threading

import pytest
import torch
from helpers.worker.command_line import assert_fails, run_barnraise
from helpers.worker.plans import tiny_plan

from barnraise.errors import StateError
from barnraise.swap import device as devices
from barnraise.swap import state_store
from barnraise.swap.arena import Arena
from barnraise.swap.device import choose_device
from barnraise.swap.lanes import WorkerLane

CARDS = ["NVIDIA GeForce GTX 1080", "NVIDIA GeForce RTX 4090"]


@pytest.fixture
def gpus(monkeypatch):
    """Let torch list two GPUs; return the failure of each one's kernels, by its number."""
    failures: dict[int, str] = {}
    ones = torch.ones

    def create(*shape, device="cpu", **options):
        if device.startswith("cuda:") and int(device[5:]) in failures:
            raise RuntimeError(failures[int(device[5:])])
        return ones(*shape, **options)

    monkeypatch.setattr(torch, "ones", create)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(CARDS))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: CARDS[index])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90"])
    return failures


@pytest.fixture
def no_gpu(monkeypatch):
    """Let torch find no GPU, whatever this machine has."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def is_one_sentence(text: str) -> bool:
    return bool(text) and "\n" not in text and "Traceback" not in text


@pytest.mark.parametrize(
    "name", ["gpu", "hip", "cuda:x", "cuda:\u00b2", "cuda:", "cpu:1", "mps:0", "cuda:-1"]
)
def test_name_of_no_device_is_refused_with_a_sentence(gpus, name):
    with pytest.raises(StateError) as caught:
        choose_device(name)
    assert re.fullmatch(f"there is no device '{name}': write cpu, .*", str(caught.value))


def test_gpu_is_named_as_torch_names_it(gpus):
    assert choose_device("cpu").name == "cpu"
    assert choose_device("cuda") == choose_device("CUDA:0") == devices.DeviceChoice("cuda")
    assert choose_device("cuda:1") == devices.DeviceChoice("cuda:1")
    assert choose_device() == devices.DeviceChoice("cuda", others=("cuda:1",))


def test_several_devices_are_chosen_by_name(gpus, monkeypatch):
    assert choose_device("cuda:1, cuda:0") == devices.DeviceChoice("cuda:1", others=("cuda",))
    with pytest.raises(StateError, match="'cuda' is named twice in 'cuda,cuda:0'"):
        choose_device("cuda,cuda:0")
    monkeypatch.setenv(devices.SAME_CARD, "1")
    assert choose_device("cpu,cpu") == devices.DeviceChoice("cpu", others=("cpu",))
    gpus[1] = "CUDA out of memory"
    choice = choose_device("cuda:0,cuda:1")
    assert (choice.name, choice.others) == ("cuda", ()) and "cuda:1 cannot be used" in choice.note
    gpus[0] = gpus[1]
    assert choose_device("cuda:0,cuda:1").name == "cpu"


@pytest.mark.parametrize("requested", ["", "cuda:0,cuda:1"])
def test_card_that_was_lost_is_left_out_while_there_are_others(gpus, monkeypatch, requested):
    monkeypatch.setenv(devices.LOST_CARDS, "cuda")
    choice = choose_device(requested)
    assert (choice.name, choice.others) == ("cuda:1", ())
    assert "cuda failed while it trained: training goes on without it" in choice.note
    assert choose_device("cuda").name == "cuda", "there is no other"


def test_card_that_returns_zeros_is_not_used(gpus, monkeypatch):
    """As RTX 4090s have done, without an error."""
    to = torch.Tensor.to

    def send(tensor, device):
        return torch.zeros_like(tensor) if tensor.numel() > 1 else to(tensor, device)

    monkeypatch.setattr(torch.Tensor, "to", send)
    assert "computes wrong results" in choose_device("cuda").note


def test_number_of_no_gpu_is_refused_with_those_there_are(gpus):
    with pytest.raises(StateError, match=r"no device 'cuda:2': .*cuda:1 \(NVIDIA GeForce RTX 4090"):
        choose_device("cuda:2")


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_gpu_that_is_not_here_is_refused_with_the_reason(monkeypatch, name):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(StateError, match=f"no device '{name}': this PyTorch is built for CPUs"):
        choose_device(name)
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def fail() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).")

    monkeypatch.setattr(torch.cuda, "init", fail)
    with pytest.raises(StateError, match="update the driver"):
        choose_device(name)


@pytest.mark.usefixtures("no_gpu")
def test_accelerator_that_is_not_supported_leads_to_the_cpu(monkeypatch):
    for name, product in (("mps", "Apple's GPU"), ("xpu", "Intel's GPU"), ("XPU", "Intel's GPU")):
        choice = choose_device(name)
        assert choice.name == "cpu" and f"{product} (" in choice.note
        assert "is not supported yet" in choice.note
    for module, note in ((torch.backends.mps, "MPS"), (torch.xpu, "XPU")):
        with monkeypatch.context() as patch:
            patch.setattr(module, "is_available", lambda: True)
            assert choose_device().name == "cpu" and note in choose_device().note
    monkeypatch.setattr(devices.shutil, "which", lambda name: None)
    assert choose_device() == devices.DeviceChoice("cpu"), "a machine without GPU needs no note"
    monkeypatch.setattr(devices.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    assert choose_device().note.startswith("Training on the CPU: ")


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("has_pip", "command"),
    [
        (True, "-m pip install --force-reinstall torch --index-url https://download.pytorch.org/"),
        (False, "uv pip install --python .* --reinstall-package torch --torch-backend=auto torch"),
    ],
)
def test_card_that_this_pytorch_cannot_use_is_named_with_the_command(monkeypatch, has_pip, command):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    found = {"nvidia-smi": "/usr/bin/nvidia-smi"}
    monkeypatch.setattr(devices.shutil, "which", found.get)
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: has_pip or None)
    note = choose_device().note
    assert "this PyTorch is built for CPUs only" in note and re.search(command, note)
    assert sys.executable in note


@pytest.mark.parametrize(
    ("failure", "meaning"),
    [
        (
            "CUDA error: no kernel image is available for execution on the device\nCUDA kernel",
            r"too old for this PyTorch \(the card is sm_61; this PyTorch is for sm_75 sm_90\)",
        ),
        ("CUDA driver version is insufficient for CUDA runtime version", "update the driver"),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", "another program has it"),
        ("CUDA out of memory. Tried to allocate 20.00 MiB.", "taken all of its memory"),
        ("CUDA error: uncorrectable ECC error encountered", "restart the machine"),
        ("something new\nwith details", "cuda:0 cannot be used: something new$"),
    ],
)
@pytest.mark.parametrize("requested", ["", "cuda"])
def test_gpu_that_cannot_compute_is_replaced_with_the_reason(gpus, failure, meaning, requested):
    gpus.update({0: failure, 1: failure} if not requested else {0: failure})
    choice = choose_device(requested)
    assert choice.name == "cpu" and choice.note.startswith("Training on the CPU: cuda:0 cannot")
    assert re.search(meaning, choice.note.split("; cuda:1")[0]) and is_one_sentence(choice.note)


def test_first_gpu_that_computes_is_chosen(gpus):
    gpus[0] = "CUDA error: no kernel image is available"
    choice = choose_device()
    assert choice.name == "cuda:1"
    assert choice.note.startswith("cuda:0 cannot be used: it is too old")


def test_gpu_that_computes_wrong_results_is_not_used(gpus, monkeypatch):
    monkeypatch.setattr(torch, "ones", lambda *shape, **options: torch.full(shape, 1.5))
    assert "computes wrong results" in choose_device("cuda").note


def test_cpu_has_no_memory_of_its_own():
    assert devices.total_memory("cpu") == devices.free_memory("cpu") == 0
    devices.limit_memory("cpu", 10**9)
    devices.synchronize("cpu")
    with devices.use_device("cpu"):
        assert devices.computes_bfloat16("cpu") and devices.device_label("cpu") == ""


def test_state_and_lanes_of_the_second_gpu_use_it(monkeypatch):
    """A recording stands for the GPU: where the arena lies, and what a thread makes current."""
    arenas, current = [], []

    class RecordingArena(Arena):
        def __init__(self, device=None, pins=False):
            arenas.append((device, pins))
            super().__init__()

    class CurrentGpu(contextlib.nullcontext):
        def __init__(self, device):
            super().__init__()
            current.append((threading.current_thread().name, device))

    monkeypatch.setattr(state_store, "Arena", RecordingArena)
    monkeypatch.setattr(torch.cuda, "device", CurrentGpu)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    second = torch.device("cuda:1")
    state_store.StateStore(tiny_plan("staged", device="cuda:1")).close()
    assert arenas[:2] == [(None, True), (second, False)]
    lane = WorkerLane("in", second)
    lane.close()
    assert current == [("barnraise-in", second)]
    with devices.use_device("cuda"):
        assert len(current) == 1, "each thread begins with the first GPU"


def test_limit_is_a_part_of_the_whole_memory(monkeypatch):
    """The number of the GPU is found as torch finds it, which refuses "cuda" here."""
    set_fractions = []

    def set_fraction(fraction, device):
        set_fractions.append((fraction, torch.cuda._utils._get_device_index(device)))

    monkeypatch.setattr(devices, "total_memory", lambda device: 8 * 10**9)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", set_fraction)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    devices.limit_memory("cuda:1", None)
    devices.limit_memory("cuda:1", 2 * 10**9)
    devices.limit_memory("cuda:1", 24 * 10**9)
    devices.limit_memory("cuda", 4 * 10**9)
    assert set_fractions == [(0.25, 1), (1.0, 1), (0.5, 0)]


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: unspecified launch failure\nCUDA kernel errors might be",
        "CUDA error: an illegal memory access was encountered",
        "HIP error: the operation cannot be performed in the present state",
        "CUDA driver error: device not ready",
    ],
)
def test_lost_device_is_no_shortage_of_memory(text):
    assert devices.is_device_lost(RuntimeError(text))
    assert not devices.is_device_memory_error(RuntimeError(text))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_shortage_of_device_memory_is_no_lost_device(error):
    assert devices.is_device_memory_error(error) and not devices.is_device_lost(error)


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), MemoryError(), OSError("gone")])
def test_errors_of_other_kinds_concern_no_device(error):
    assert not devices.is_device_lost(error) and not devices.is_device_memory_error(error)


@pytest.mark.integration
def test_command_with_an_unknown_device_prints_one_sentence(tmp_path):
    result = run_barnraise(tmp_path, "plan", "--model", "gpt-nano", "--device", "gpu")
    assert_fails(result, "there is no device 'gpu': write cpu, cuda, or cuda:1")


def test_determinism_is_required_of_every_kernel(monkeypatch):
    """A kernel that cannot give the same bits each time then raises an error."""
    settings = torch.utils.deterministic
    monkeypatch.setattr(settings, "fill_uninitialized_memory", True)
    try:
        devices.require_determinism()
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not settings.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)
