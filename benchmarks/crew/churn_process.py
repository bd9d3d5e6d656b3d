"""One machine of the run in which a crew's machines are killed: `churn_process.py HOME ROLE PORT`.

The roles are `lead`, `member` and `witness`, a volunteer that receives updates and makes none. The
folder above the home has the run's text, its spec and the crew's code. SIGTERM ends a process as
Ctrl-C ends the command.
"""

import logging
import math
import shutil
import sys
from pathlib import Path

import torch
from example_hardware import cpu_machine
from joined_run import MIRROR, Setup, build_joined_run
from run_text import TEXT, prepare_text

from barnraise.cli.signals import stop_on_signals
from barnraise.peering.transports.iroh_transport import IrohTransport, wait_until_free
from barnraise.planning.limits import Limits
from barnraise.protocol.messages import Signed
from barnraise.protocol.signing import digest
from barnraise.spec import ModelSpec, Recipe, RunSpec
from barnraise.state_dir import StateDir
from barnraise.swap.engine import StepStats
from barnraise.training.crew.crew_code import parse_code
from barnraise.training.crew.crew_membership import CrewMembership
from barnraise.training.crew.crew_worker import CrewOptions, CrewWorker, describe_request, form_crew
from barnraise.training.join import JoinedRun
from barnraise.training.train import Worker

MODEL = ModelSpec(layers=6, width=64, heads=2, context=64, vocabulary=256)
MEMBERS = 2
# So slow that the planner gives every machine a part.
HARDWARE = cpu_machine(cores=1, disk=8 << 30, matmul=((768, 1e6),), attention=1e6)
HOST = "127.0.0.1"
TEXT_FOLDER, MANIFEST_FILE, CODE_FILE, LEAD_FILE = "text", "manifest.json", "code", "lead.txt"
POSITION_FILE = "position"  # in the run's folder: how many steps the crew has made


def prepare(folder: Path, lead_key: str, lead_port: int) -> None:
    """Write what all machines need into a folder."""
    manifest = prepare_text(folder / TEXT_FOLDER, MIRROR)
    (folder / MANIFEST_FILE).write_text(manifest.model_dump_json())
    (folder / LEAD_FILE).write_text(f"{lead_key} {lead_port}")


def join(home: StateDir, port: int) -> JoinedRun:
    """Return this machine's part in the run."""
    folder = home.path.parent
    text = (folder / MANIFEST_FILE).read_text()
    lead_key, lead_port = (folder / LEAD_FILE).read_text().split()
    recipe = Recipe(
        token_budget=1 << 40,
        learning_rate=3e-3,
        warmup_tokens=4096,
        step_sequences=16,
        round_steps=10,
        strategy="async",  # rounds of so many steps: the clock would end rounds of twice as many
        evaluate_every=1 << 39,
    )
    spec = RunSpec(
        MODEL,
        TEXT,
        recipe,
        seed=7,
        owner=MIRROR.key,
        roots=(MIRROR.key,),
        manifest=digest(Signed.model_validate_json(text).body),
    )
    peers = () if home.identity.key == lead_key else ((lead_key, int(lead_port)),)
    # A crew's lead sends no snapshots: who trusts nobody's weights receives every update at once.
    setup = Setup(home.path, spec.to_json(), text, port, peers, trust_one=False)
    return build_joined_run(setup, home)


class Lead(CrewWorker):
    """A lead that writes its position after each step; its status comes out more rarely."""

    def finish_step(self, stats: StepStats) -> None:
        """Write the position; a kill leaves the file as it was or as it is to be."""
        path = self.joined.folder.path / POSITION_FILE
        path.with_suffix(".new").write_text(str(self.engine.progress.position))
        path.with_suffix(".new").replace(path)


class Witness(Worker):
    """A volunteer that receives updates and makes none."""

    def wait_for_round(self) -> bool:
        """Receive updates until this process is to end."""
        self.exchange_until(self.leaving.is_set, math.inf)
        return False


def main() -> None:
    """Take part in the run until this process is to end."""
    home, role, port = StateDir(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])
    logging.basicConfig(
        filename=home.path / "log", level=logging.INFO, format="%(asctime)s %(message)s"
    )
    leaving = stop_on_signals()
    torch.set_num_threads(1)
    joined = join(home, port)
    code_file = home.path.parent / CODE_FILE

    def open_transport() -> IrohTransport:
        wait_until_free(port)
        return IrohTransport(home.identity.secret, host=HOST, port=port)

    request = describe_request(joined, HARDWARE, Limits())
    if role == "member":
        membership = CrewMembership(
            joined, parse_code(code_file.read_text()), home.path.name, request
        )
        membership.run(open_transport(), leaving.is_set)
        return
    shutil.copytree(
        home.path.parent / TEXT_FOLDER, joined.folder.path / "blobs", dirs_exist_ok=True
    )
    if role == "witness":
        Witness(joined, leaving, HARDWARE, transport=open_transport()).run()
        return
    crew = form_crew(
        joined,
        request,
        CrewOptions(MEMBERS, boundary_bits=32, port=port),
        open_transport(),
        leaving.is_set,
        code_file.write_text,
    )
    if crew is not None:
        machine = HARDWARE, Limits()
        Lead(crew, joined, leaving, machine, lambda status: None, open_transport()).run()


if __name__ == "__main__":
    main()
