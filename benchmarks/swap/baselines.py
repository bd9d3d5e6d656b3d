"""What a user would otherwise pick, measured on this machine: FSDP2 and DeepSpeed with CPU offload, and plain torch.

    python benchmarks/swap/baselines.py --peer fsdp2 --model gpt2-124m --micro-tokens 1024 --micro-batches 2 --steps 6

prints one line of JSON. `measure` is the same for other benchmarks, and `batches` gives them the very tokens;
baseline_train.py is what runs in the child.

The same for all, and to be the same for ours beside them: the layers (`barnraise.models.gpt2`), fp32, tokens by seed,
sequences of min(context, micro-tokens), M micro-batches accumulated into a mean gradient, every block recomputed from
its input, AdamW with GPT-3's betas and decay at one learning rate after one global-norm clip at 1.0, the threads, and a
process of its own whose peak resident set (VmHWM, from its start to its end) is the memory. The first step is the
warm-up. Initial weights are by seed too, so the peers' losses (before each step's update) agree to the digits printed;
ours draws its own of the same deviations.

Given to the peers: the head's loss in slices, as ours has it (measured: as fast as `F.cross_entropy` on whole logits,
350 MB less in torch at gpt2-124m and 1,024 tokens); `--loss whole` is the usual way.

Not the same, because it is what that system does:
* torch: everything resident; AdamW(fused=True). The unswapped control, not a peer.
* fsdp2: `fully_shard` on each block and the root, CPUOffloadPolicy, one gloo rank; AdamW(fused=True) over its DTensors.
  Gradients are reduced once a step (`set_requires_gradient_sync`). fsdp2-lean reduces them every micro-batch: 3 to 5 %
  slower and at least 5 % less memory. Compare speed with the one and memory with the other.
* deepspeed: ZeRO-3, optimizer and parameters offloaded to the CPU, its own CPUAdam (AdamW mode, compiled here for this
  CPU) and clipping. Buckets of width², which is what Hugging Face's "auto" asks for, instead of 2 GB ones; releasing
  parameters at once and small optimizer groups were measured too and gain nothing.
* Without an accelerator "offload" moves weights from RAM to RAM in both; neither puts them on disk this way. Where RAM
  does not hold the training state they do not run at all.

DeepSpeed lives in build/peers-venv, made on first use beside the project's own torch, with requirements-baselines.txt. That
takes a C++ compiler, Python's headers, a minute or two and the package registry.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from barnraise import spec
from barnraise.errors import SpecError
from barnraise.planning.hardware import memory_bytes
from barnraise.spec import PRESETS, ModelSpec, preset

PEERS = ("torch", "fsdp2", "fsdp2-lean", "deepspeed")
LOSSES = ("sliced", "whole")
SEED = 1
STATE = 16  # bytes a parameter, of weights, gradient and moments: the least any of them holds…
BESIDES = 1 << 30  # …next to torch itself, a layer under way and its activations
INSTALL_SECONDS = 900  # each part of it; compiling takes about one minute
START_SECONDS, STEP_SECONDS = 300, 600  # more than this and the peer is stuck

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / "build" / "peers-venv"
REQUIREMENTS = Path(__file__).with_name("requirements-baselines.txt")
TRAIN = Path(__file__).with_name("baseline_train.py")
PATHS = [
    str(Path(module.__file__).parents[1]) for module in (spec, torch)
]  # where the project and its torch lie
DEEPSPEED = {
    "DS_ACCELERATOR": "cpu",
    "TORCH_EXTENSIONS_DIR": str(VENV / "extensions"),
    "PATH": f"{VENV / 'bin'}{os.pathsep}{os.environ['PATH']}",  # its ninja
    **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"},
}
COMPILE = """
from deepspeed.ops.op_builder import CPUAdamBuilder
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
CPUAdamBuilder().load(), ShareMemCommBuilder().load()
"""


class PeerError(Exception):
    """The peer could not be installed or run; one sentence."""


def batches(model: ModelSpec, micro_tokens: int, micro_batches: int) -> Iterator[list[Tensor]]:
    """For ever, one step's micro-batches: int64 [B, T + 1] each. Words by Zipf's law, so that there is something to
    learn from the first step on."""
    length = min(model.context, max(1, micro_tokens))
    if min(micro_tokens, micro_batches) < 1 or micro_tokens % length:
        raise PeerError(
            f"{micro_batches} micro-batches of {micro_tokens} tokens are not whole sequences of {length}"
        )
    dice = torch.Generator().manual_seed(SEED)
    order = torch.randperm(model.vocabulary, generator=dice)
    zipf = 1 / torch.arange(1, model.vocabulary + 1)
    shape = micro_tokens // length, length + 1
    while True:
        yield [
            order[torch.multinomial(zipf, shape[0] * shape[1], True, generator=dice)].view(shape)
            for _ in range(micro_batches)
        ]


def measure(
    peer: str,
    model: str,
    micro_tokens: int,
    micro_batches: int,
    steps: int,
    loss: str = "sliced",
    threads: int | None = None,
    timeout: float | None = None,
) -> dict:
    """Trains `steps` (2 or more) steps in a child process with as many threads as torch has here, and says
    {"peer", "tokens_per_second" (median after the first step), "step_seconds": […], "peak_rss_mb" (MiB), "loss_first",
    "loss_last" (nats a token), "threads", "version"}. Raises PeerError when it cannot be installed or run, or is not
    done in `timeout` seconds (by default 5 minutes and 10 a step)."""
    if peer not in PEERS:
        raise PeerError(f"there is no peer '{peer}'; the peers are {', '.join(PEERS)}")
    if steps < 2:
        raise PeerError("one step is the warm-up: measure 2 or more")
    try:
        shape = preset(model)
    except SpecError as error:
        raise PeerError(str(error)) from None
    next(batches(shape, micro_tokens, micro_batches))  # says so here when they do not divide
    if (need := STATE * shape.parameters + BESIDES) > (have := memory_bytes()):
        raise PeerError(
            f"{peer} holds {model} in RAM: at least {need / 1e9:,.1f} GB, and there are {have / 1e9:,.1f}"
        )
    found = filter(
        None, [PATHS[0], str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH")]
    )
    environment = {
        "OMP_NUM_THREADS": str(threads or torch.get_num_threads()),
        "PYTHONPATH": os.pathsep.join(found),
    }
    python = sys.executable
    if peer == "deepspeed":
        python = install()
        environment |= DEEPSPEED
    asked = [peer, model, micro_tokens, micro_batches, steps, loss]
    command = [python, str(TRAIN), json.dumps(asked)]
    said = call(
        command, environment, timeout or START_SECONDS + STEP_SECONDS * steps, f"{peer} on {model}"
    )
    return json.loads(said.splitlines()[-1])


def install() -> str:
    """The Python that has DeepSpeed; made, and its extensions compiled, unless that was done for this torch."""
    python, marker = str(VENV / "bin" / "python"), VENV / "installed"
    wanted = "\n".join([REQUIREMENTS.read_text(), sys.version, torch.__version__, *PATHS])
    if marker.exists() and marker.read_text() == wanted:
        return python
    what = "installing DeepSpeed"
    call([sys.executable, "-m", "venv", "--clear", str(VENV)], {}, INSTALL_SECONDS, what)
    for site in VENV.glob("lib/python*/site-packages"):
        (site / "project.pth").write_text(
            "".join(f"{path}\n" for path in PATHS)
        )  # after its own packages
    pip = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--requirement",
        str(REQUIREMENTS),
    ]
    call(pip, {"PIP_CONSTRAINT": str(REQUIREMENTS)}, INSTALL_SECONDS, what)
    call([python, "-c", COMPILE], DEEPSPEED, INSTALL_SECONDS, "compiling DeepSpeed's CPUAdam")
    marker.write_text(wanted)
    return python


def call(command: list[str], environment: dict[str, str], timeout: float, what: str) -> str:
    """Runs it to its end, or ends it and all it started; its standard output. Raises PeerError."""
    with subprocess.Popen(
        command,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, complaint = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise PeerError(
                f"{what} was not done after {timeout:,.0f} seconds and was ended"
            ) from None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode == -signal.SIGKILL:
        raise PeerError(f"{what} was killed, most likely for want of memory")
    if process.returncode:
        lines = [line for line in complaint.splitlines() if line.strip()] or ["it did not say why"]
        raise PeerError(f"{what} failed: {lines[-1]}")
    return said


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", choices=PEERS, required=True)
    parser.add_argument("--model", choices=PRESETS, default="gpt2-124m")
    parser.add_argument("--micro-tokens", type=int, default=1024)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--loss", choices=LOSSES, default="sliced")
    parser.add_argument("--threads", type=int)
    try:
        print(json.dumps(measure(**vars(parser.parse_args()))))
    except PeerError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
