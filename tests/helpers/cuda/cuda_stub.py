"""Processes in which a torch without CUDA differentiates fake tensors on a CUDA device.

The stub (`cuda_stub.cpp`) must be there before torch is, so it is loaded into processes of its own.
This module imports no torch.
"""

import ctypes
import hashlib
import importlib.util
import multiprocessing
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".cpp")


def torch_folder() -> Path:
    """Return torch's folder, without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def compile_stub() -> Path:
    """Return the compiled stub, compiled for this torch if it was not before.

    Raises:
        RuntimeError: there is no C++ compiler; the message says what to install.
    """
    torch = torch_folder()
    key = hashlib.sha256(SOURCE.read_bytes() + (torch / "version.py").read_bytes()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"barnraise-cuda-stub-{os.getuid()}-{key}.so"
    if library.exists():
        return library
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        raise RuntimeError("these tests need a C++ compiler: install g++ or clang++")
    unfinished = library.with_suffix(f".{os.getpid()}")
    command = [compiler, "-std=c++20", "-shared", "-fPIC", "-O0", f"-I{torch / 'include'}"]
    subprocess.run([*command, SOURCE, "-o", unfinished], check=True)
    unfinished.rename(library)  # whole or not at all: several test processes may compile it
    return library


def load_stub(library: Path) -> None:
    """Load torch's libraries and the stub, before anything imports torch."""
    libraries = torch_folder() / "lib"
    for path in (*sorted(libraries.glob("libgomp*")), libraries / "libc10.so"):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(libraries / "libtorch_cpu.so"), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def card_process() -> ProcessPoolExecutor:
    """Return a pool of one process with the stub, in which fake cards work."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, spawn, load_stub, (compile_stub(),))
