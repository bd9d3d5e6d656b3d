"""Measure what a user would otherwise choose: FSDP2 and DeepSpeed with CPU offload, plain torch.

    python benchmarks/swap/baselines.py --peer fsdp2 --model gpt2-124m --steps 6

prints one line of JSON. Other benchmarks call `measure`, and `batches` gives them the same tokens;
baseline_train.py is the program that runs in the child process.

The following is the same for all baselines, and for the swap engine where it is compared with them:
the layers (`barnraise.models.gpt2`), fp32, tokens that only the seed decides, sequences of
min(context, micro-batch tokens), M micro-batches accumulated into a mean gradient, every block
recomputed from its input, AdamW with GPT-3's betas and decay at one learning rate after one
global-norm clip at 1.0, the number of threads, and a process of its own whose peak resident set
(VmHWM, from its start to its end) is the memory. The first step is the warm-up. Initial weights
depend only on the seed too, so the baselines' losses before each step's update agree to the digits
printed; the swap engine draws its own with the same deviations.

The baselines get the loss in slices, as the swap engine has it: that is as fast as
`F.cross_entropy` on whole logits and takes 350 MB less in torch (measured at gpt2-124m with 1,024
tokens). `--loss whole` is the usual way.

The following differs, because it is how that system works:

* torch: everything resident; AdamW(fused=True). It is the unswapped control, not a competitor.
* fsdp2: `fully_shard` on each block and the root, CPUOffloadPolicy, one gloo rank;
  AdamW(fused=True) over its DTensors. Gradients are reduced once a step
  (`set_requires_gradient_sync`). fsdp2-lean reduces them every micro-batch: 3 to 5 % slower and at
  least 5 % less memory. Compare speed with the former and memory with the latter.
* deepspeed: ZeRO-3, optimizer and parameters offloaded to the CPU, its own CPUAdam (AdamW mode,
  compiled here for this CPU) and clipping. Buckets have width² elements, which is what Hugging
  Face's "auto" asks for, instead of 2 GB. Releasing parameters at once and small optimizer groups
  were measured too and gain nothing.
* Without an accelerator, "offload" moves weights from RAM to RAM in both. Neither puts them on disk
  this way: where RAM does not hold the training state they do not run at all.

DeepSpeed is installed into build/baselines-venv on first use, with requirements-baselines.txt and
the project's own torch. That takes a C++ compiler, Python's headers, a minute or two and the
package registry.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from barnraise import spec
from barnraise.errors import SpecError
from barnraise.planning.hardware import memory_bytes
from barnraise.spec import PRESETS, ModelSpec, preset

BASELINES = ("torch", "fsdp2", "fsdp2-lean", "deepspeed")
LOSSES = ("sliced", "whole")
SEED = 1
# The least memory of any of them: weights, gradient and moments take 16 bytes a parameter; torch
# itself, a layer being computed and its activations take 1 GiB.
STATE_BYTES_PER_PARAMETER = 16
OTHER_BYTES = 1 << 30
INSTALL_SECONDS = 900.0  # for each part of the installation; compiling takes about one minute
# A baseline that takes longer is stuck.
START_SECONDS = 300.0
STEP_SECONDS = 600.0

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / "build" / "baselines-venv"
REQUIREMENTS = Path(__file__).with_name("requirements-baselines.txt")
TRAIN = Path(__file__).with_name("baseline_train.py")
# The folders from which the project and its torch are imported.
PATHS = [str(Path(str(module.__file__)).parents[1]) for module in (spec, torch)]
DEEPSPEED_ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "TORCH_EXTENSIONS_DIR": str(VENV / "extensions"),
    "PATH": f"{VENV / 'bin'}{os.pathsep}{os.environ['PATH']}",  # holds its ninja
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_SIZE": "1",
}
COMPILE = """
from deepspeed.ops.op_builder import CPUAdamBuilder
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
CPUAdamBuilder().load(), ShareMemCommBuilder().load()
"""


class BaselineError(Exception):
    """The baseline could not be installed or run; the message is one sentence."""


def batches(model: ModelSpec, micro_tokens: int, micro_batches: int) -> Iterator[list[Tensor]]:
    """Yield one step's micro-batches at a time, without end.

    Tokens follow Zipf's law, so that there is something to learn from the first step on.

    Args:
        model: decides the vocabulary and the longest sequence.
        micro_tokens: tokens of a micro-batch.
        micro_batches: micro-batches of a step.

    Yields:
        int64 [B, T + 1] for each micro-batch.

    Raises:
        BaselineError: if a micro-batch is not made of whole sequences.
    """
    length = min(model.context, max(1, micro_tokens))
    if min(micro_tokens, micro_batches) < 1 or micro_tokens % length:
        raise BaselineError(
            f"{micro_batches} micro-batches of {micro_tokens} tokens "
            f"are not whole sequences of {length}"
        )
    generator = torch.Generator().manual_seed(SEED)
    tokens_by_rank = torch.randperm(model.vocabulary, generator=generator)
    zipf = 1 / torch.arange(1, model.vocabulary + 1)
    shape = (micro_tokens // length, length + 1)
    while True:
        yield [
            tokens_by_rank[
                torch.multinomial(zipf, shape[0] * shape[1], True, generator=generator)
            ].view(shape)
            for _ in range(micro_batches)
        ]


@dataclass(frozen=True)
class BaselineTraining:
    """What a baseline trains.

    Attributes:
        peer: One of BASELINES.
        model: A preset's name.
        micro_tokens: Tokens of a micro-batch.
        micro_batches: Micro-batches of a step.
        steps: 2 or more; the first is the warm-up.
        loss: One of LOSSES.
    """

    peer: str
    model: str
    micro_tokens: int
    micro_batches: int
    steps: int
    loss: str = "sliced"

    def check(self) -> None:
        """Check that it can be trained on this machine.

        Raises:
            BaselineError: if it cannot.
        """
        if self.peer not in BASELINES:
            choices = ", ".join(BASELINES)
            raise BaselineError(f"there is no baseline '{self.peer}'; choose from {choices}")
        if self.steps < 2:
            raise BaselineError("one step is the warm-up: measure 2 or more")
        try:
            model = preset(self.model)
        except SpecError as error:
            raise BaselineError(str(error)) from None
        next(batches(model, self.micro_tokens, self.micro_batches))  # Fails if they do not divide.
        needed = STATE_BYTES_PER_PARAMETER * model.parameters + OTHER_BYTES
        available = memory_bytes()
        if needed > available:
            raise BaselineError(
                f"{self.peer} holds {self.model} in RAM: "
                f"at least {needed / 1e9:,.1f} GB, and there are {available / 1e9:,.1f}"
            )


def measure(training: BaselineTraining, threads: int | None = None) -> dict[str, Any]:
    """Train a baseline in a child process and measure it.

    The child has 5 minutes, and 10 for each step.

    Args:
        training: what to train.
        threads: as many as torch has in this process by default.

    Returns:
        {"peer", "tokens_per_second" (median after the first step), "step_seconds", "peak_rss_mb"
        (MiB), "loss_first", "loss_last" (nats per token), "threads", "version"}.

    Raises:
        BaselineError: if it cannot be installed or run, or takes too long.
    """
    training.check()
    paths = [PATHS[0], str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH")]
    environment = {
        "OMP_NUM_THREADS": str(threads or torch.get_num_threads()),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    python = sys.executable
    if training.peer == "deepspeed":
        python = install_deepspeed()
        environment |= DEEPSPEED_ENVIRONMENT
    output = run_command(
        [python, str(TRAIN), json.dumps(astuple(training))],
        environment,
        START_SECONDS + STEP_SECONDS * training.steps,
        f"{training.peer} on {training.model}",
    )
    return json.loads(output.splitlines()[-1])


def install_deepspeed() -> str:
    """Install DeepSpeed and compile its extensions, unless that was done for this torch.

    Returns:
        The path of the Python that can import it.
    """
    python, marker = str(VENV / "bin" / "python"), VENV / "installed"
    wanted = "\n".join([REQUIREMENTS.read_text(), sys.version, torch.__version__, *PATHS])
    if marker.exists() and marker.read_text() == wanted:
        return python
    activity = "installing DeepSpeed"
    create_venv = [sys.executable, "-m", "venv", "--clear", str(VENV)]
    run_command(create_venv, {}, INSTALL_SECONDS, activity)
    for site in VENV.glob("lib/python*/site-packages"):
        # Python searches these folders after the environment's own packages.
        (site / "project.pth").write_text("".join(f"{path}\n" for path in PATHS))
    pip = [python, "-m", "pip", "install", "--quiet", "--no-deps"]
    pip += ["--requirement", str(REQUIREMENTS)]
    run_command(pip, {"PIP_CONSTRAINT": str(REQUIREMENTS)}, INSTALL_SECONDS, activity)
    compile_command = [python, "-c", COMPILE]
    run_command(
        compile_command, DEEPSPEED_ENVIRONMENT, INSTALL_SECONDS, "compiling DeepSpeed's CPUAdam"
    )
    marker.write_text(wanted)
    return python


def run_command(
    command: list[str], environment: dict[str, str], timeout: float, activity: str
) -> str:
    """Run a command to its end; if it takes too long, kill it and all that it started.

    Args:
        command: the program and its arguments.
        environment: variables added to this process's own.
        timeout: seconds.
        activity: names the command in errors.

    Returns:
        Its standard output.

    Raises:
        BaselineError: if the command fails, is killed or takes too long.
    """
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
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise BaselineError(
                f"{activity} was not done after {timeout:,.0f} seconds and was ended"
            ) from None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode == -signal.SIGKILL:
        raise BaselineError(f"{activity} was killed, most likely for want of memory")
    if process.returncode:
        lines = [line for line in errors.splitlines() if line.strip()]
        reason = lines[-1] if lines else "it printed no reason"
        raise BaselineError(f"{activity} failed: {reason}")
    return output


def main() -> None:
    """Measure the baseline that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", choices=BASELINES, required=True, help="the baseline")
    parser.add_argument("--model", choices=PRESETS, default="gpt2-124m")
    parser.add_argument("--micro-tokens", type=int, default=1024)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--loss", choices=LOSSES, default="sliced")
    parser.add_argument("--threads", type=int)
    arguments = vars(parser.parse_args())
    threads = arguments.pop("threads")
    try:
        print(json.dumps(measure(BaselineTraining(**arguments), threads)))
    except BaselineError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
