"""Run the workers of `make bench-exchange` in one network namespace, one job after the other.

Each line of standard input is the path of a job. A job runs in a forked process, so that torch is
imported once and not in each of a hundred measurements. Next to the job's file, `.pid` and `.exit`
state the process and how it ended. The program ends when its standard input is closed.
"""

import importlib
import os
import sys
import traceback
import warnings
from pathlib import Path

import field_model  # noqa: F401  (imports torch before jobs fork)
import torch
import torch.fx.experimental.symbolic_shapes
from field_job import FieldJob


def run_job(path: Path) -> None:
    """Run the adapter that a job names; its messages go to the job's log."""
    os.setsid()
    log = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)  # the thread budget of every system
    torch.manual_seed(0)
    job = FieldJob.load(path)
    importlib.import_module(f"systems.{job.system}").run_worker(job)


def main() -> None:
    """Serve jobs."""
    print("ready", flush=True)
    for line in sys.stdin:
        path = Path(line.strip())
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                run_job(path)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        path.with_suffix(".pid").write_text(str(pid))
        _, status = os.waitpid(pid, 0)
        path.with_suffix(".exit").write_text(str(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main()
