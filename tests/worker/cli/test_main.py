"""The `barnraise` command as a person runs it: every expected failure is one sentence and exit code 1."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.fake_coordinator import MACHINE
from helpers.fake_coordinator import FakeCoordinator as Small
from helpers.paths import WORKER
from typer.testing import CliRunner

from barnraise.cli import main, plan
from barnraise.errors import PlanError, SpecError, StateError
from barnraise.exchange.handlers.verdict_handler import VERDICT_FOLDER
from barnraise.exchange.ledger.ledger import GENESIS_DIGEST, Ledger
from barnraise.exchange.ledger.validation import UpdateRules
from barnraise.exchange.ledger.verdicts import verify_proof
from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import Limits
from barnraise.protocol.coordinator_messages import (
    EnrolmentReply,
    EnrolmentStatus,
    JoinReply,
    MirrorView,
    Problem,
    RunView,
)
from barnraise.protocol.messages import Update
from barnraise.protocol.signing import digest
from barnraise.protocol.verdicts import SignedVerdict
from barnraise.spec import ModelSpec, RunSpec, TextSpec
from barnraise.state_dir import RunDir, SiteMembership, StateDir
from barnraise.training.join import JOIN_REPLY_FILE

RUN = "01890000-0000-7000-8000-000000000001"


def barnraise(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(WORKER),
        "BARNRAISE_HOME": str(home),
        "COLUMNS": "200",
    }
    return subprocess.run(
        [sys.executable, "-m", "barnraise", *words], env=environment, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip


def fails(done: subprocess.CompletedProcess[str], sentence: str) -> None:
    assert done.returncode == 1, done
    assert sentence in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.startswith("barnraise: ") or "\nbarnraise: " in done.stderr


@pytest.fixture
def small():
    made = Small()
    codes = iter(["pending", "away", "approved"])

    def status(body):
        if (said := next(codes)) == "away":
            return 503, Problem(error="the site is restarting")
        return EnrolmentStatus(
            status=said, machine=MACHINE if said == "approved" else None, person="Ida [/x]"
        )

    made.routes["POST /enrolments"] = lambda body: EnrolmentReply(
        code="ABCD-EFGH", url=f"{made.url}/machines/ABCD-EFGH", expires=9e9, poll_every=0.2
    )
    made.routes["GET /enrolments/ABCD-EFGH"] = status
    yield made
    made.close()


def test_login_waits_through_a_moments_outage_and_keeps_who_approved(small, tmp_path):
    done = barnraise(tmp_path, "login", small.url)
    assert done.returncode == 0, done.stderr
    assert "ABCD-EFGH" in done.stdout and "Ida [/x]" in done.stdout
    assert StateDir(tmp_path).membership.machine == MACHINE


@pytest.mark.parametrize("said", ["refused", "expired"])
def test_login_with_a_code_that_was_not_approved_says_so_and_keeps_nothing(small, tmp_path, said):
    small.routes["GET /enrolments/ABCD-EFGH"] = lambda body: EnrolmentStatus(status=said)
    fails(
        barnraise(tmp_path, "login", small.url), f"the code was {said}: run `barnraise login` again"
    )
    assert not (tmp_path / "coordinator.json").exists()


def test_login_at_an_address_where_nobody_is(tmp_path):
    fails(barnraise(tmp_path, "login", "http://127.0.0.1:9"), "does not answer")


def test_what_needs_an_enrolled_machine_or_a_run_says_which(tmp_path):
    fails(
        barnraise(tmp_path, "join", "a-run"),
        "this machine is not enrolled yet: run `barnraise login URL` first",
    )
    fails(barnraise(tmp_path, "runs"), "this machine is not enrolled yet")
    fails(
        barnraise(tmp_path, "export", "a-run", str(tmp_path / "out")), "has never worked on 'a-run'"
    )
    fails(barnraise(tmp_path, "verdict", "a-run"), "has never worked on 'a-run'")
    assert not (tmp_path / "out").exists()


def test_status_with_nothing_or_with_a_file_that_a_crash_cut_off(tmp_path):
    assert "has not trained yet" in barnraise(tmp_path, "status").stdout
    RunDir(tmp_path / "runs" / RUN, RUN, StateDir(tmp_path).identity.key).close()
    (tmp_path / "runs" / RUN / "status.json").write_text("")
    done = barnraise(tmp_path, "status")
    assert done.returncode == 0 and "has not trained yet" in done.stdout
    assert barnraise(tmp_path, "status", "--json").stdout.strip() == "[]"


def test_a_refusal_that_looks_like_markup_is_printed_as_it_is(small, tmp_path):
    mirror = MirrorView(key=small.identity.key, name="small", protocols=[1], time=0)
    StateDir(tmp_path).save_membership(
        SiteMembership(url=small.url, mirror=mirror, machine=MACHINE)
    )
    small.routes["GET /runs/a-run"] = lambda body: (
        404,
        Problem(error="there is no run [/bold] here"),
    )
    fails(barnraise(tmp_path, "join", "a-run"), "there is no run [/bold] here")


@pytest.mark.parametrize(("words", "nicer"), [((), 10), (("--eager",), 0)])
def test_join_lowers_its_priority_unless_eager(tmp_path, words, nicer):
    mirror = MirrorView(key=StateDir(tmp_path).identity.key, name="small", protocols=[1], time=0)
    StateDir(tmp_path).save_membership(
        SiteMembership(url="http://127.0.0.1:9", mirror=mirror, machine=MACHINE)
    )
    group = (
        "cli.TERMINAL.read_text().split()[-1] if cli.TERMINAL.exists() else psutil.Process().nice()"
    )
    then = f"cli.measure = lambda *where: sys.exit(f'{{psutil.Process().nice()}} {{{group}}}')"
    code = f"import os, psutil, sys; from barnraise.cli import main as cli; {then}; cli.main()"
    command = [sys.executable, "-c", code, "join", "a-run", "--home", str(tmp_path), *words]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(WORKER)}, capture_output=True, text=True, check=False,
        start_new_session=True,
    )  # fmt: skip
    assert done.stderr.split()[-2:] == [str(max(nicer, os.nice(0))), str(nicer)], done.stderr


def test_a_home_that_cannot_be_made_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    fails(barnraise(tmp_path / "file" / "home", "status"), "Not a directory")


# ---- plans and limits --------------------------------------------------------------------------------------------


@pytest.fixture
def measured(tmp_path, monkeypatch) -> Path:
    """A machine whose rates nobody has to measure, in a home."""
    machine = Hardware(
        device="cpu", name="a [small] machine", cores=2, memory=8 << 30, device_memory=0, disk=100 << 30,
        dtype="float32", matmul=((768, 1e11),), attention=5e10, elementwise=1e10, to_device=1e10, from_device=1e10,
        stream=2e10, adam=5e8, disk_read=2e9, disk_write=1e9,
    )  # fmt: skip
    monkeypatch.setattr(plan, "measure", lambda *where: machine)
    return tmp_path


def planned(home: Path, *words: str) -> str:
    done = CliRunner().invoke(
        main.app, ["plan", "--home", str(home), *words], env={"COLUMNS": "100"}
    )
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def test_a_plan_says_what_lies_where_and_how_long_a_step_takes(measured):
    said = planned(measured, "--model", "gpt2-1.5b", "--memory", "4GB", "--disk", "90GB")
    assert "a [small] machine" in said and "tokens/s" in said and "what limits" in said
    assert "disk read" in said and "compute" in said and "feedback" in said
    told = json.loads(
        planned(measured, "--model", "gpt2-1.5b", "--memory", "4GB", "--disk", "90GB", "--json")
    )
    assert told["host_bytes"] <= 4e9 and told["disk_bytes"] <= 90e9 and told["step_seconds"] > 0
    assert sum(sum(row.values()) for row in told["state_bytes"].values()) >= 20 * 1_557_611_200


def test_a_gpu_that_is_not_there_is_assumed_and_said_to_be(measured):
    words = (
        "--model",
        "gpt3-6.7b",
        "--memory",
        "64GB",
        "--disk",
        "500GB",
        "--device-memory",
        "24GB",
    )
    said = planned(measured, *words, "--device", "cuda")
    assert "an assumed GPU" in said and "60 TFLOP/s" in said and "are assumed" in said
    host = replace(plan.measure(), logits=((2048, 1e10),))
    gpu = plan.assumed_gpu(host, 6e13, 2e10, 24 * 10**9)
    assert not gpu.logits and not gpu.products, "no rate of the host's passes for the GPU's"
    assert "--device cuda assumes a GPU" in " ".join(
        planned(measured, *words).split()
    )  # wherever its lines end


def test_what_cannot_be_planned_is_one_sentence(measured):
    with pytest.raises(SpecError, match="there is no preset 'gpt-5'; the presets are gpt-nano"):
        planned(measured, "--model", "gpt-5")
    with pytest.raises(PlanError, match=r"does not fit: .* What would fit: "):
        planned(measured, "--model", "gpt2-1.5b", "--memory", "4GB", "--disk", "10GB")
    with pytest.raises(StateError, match="'much' is not a size"):
        planned(measured, "--model", "gpt2-1.5b", "--memory", "much")


def test_limits_last_until_they_are_lifted(tmp_path):
    assert (
        barnraise(
            tmp_path, "limits", "--memory", "4GB", "--moments-8bit", "--clipping", "layer"
        ).returncode
        == 0
    )
    assert StateDir(tmp_path).limits == Limits(memory=4 * 10**9, moments_bits=8, clipping="layer")
    done = barnraise(tmp_path, "limits", "--memory", "auto", "--disk", "1TB", "--json")
    assert json.loads(done.stdout)["memory"] is None and StateDir(tmp_path).limits.disk == 10**12
    assert barnraise(tmp_path, "limits", "--uplink", "250KB").returncode == 0
    assert StateDir(tmp_path).limits.uplink == 250_000
    fails(barnraise(tmp_path, "limits", "--clipping", "hard"), "clipping must be one of")
    (tmp_path / "limits.json").write_text("{")
    fails(barnraise(tmp_path, "limits"), "is damaged")


def test_status_tells_of_each_peer_and_reads_what_older_versions_wrote(tmp_path):
    told = {
        "name": "Ridge", "activity": "training", "step": 7, "loss": 2.5, "rate": 100.0, "updates_sent": 3,
        "updates_received": 4, "peers": 2, "ledger_tokens": 50, "token_budget": 100,
    }  # fmt: skip
    now = {
        "exchange": {
            "round_steps": 12, "scheme": "dense4", "density": 1.0, "bits_per_parameter": 4.01, "sent_rate": 50_000.0,
            "received_rate": 1_500_000.0, "uplink_rate": 200_000.0, "lag": 3,
        },
        "neighbours": [
            {"key": "a" * 64, "lag": 0, "up": 50_000.0, "down": 1_500_000.0, "agrees": True},
            {"key": "b" * 64, "lag": 2, "up": 0.0, "down": 0.0, "agrees": False},
        ],
    }  # fmt: skip
    RunDir(tmp_path / "runs" / RUN, RUN, StateDir(tmp_path).identity.key).close()
    path = tmp_path / "runs" / RUN / "status.json"
    path.write_text(json.dumps(told | now))
    said = barnraise(tmp_path, "status").stdout
    assert "12 steps a round, 4.01 bits" in said
    assert "50 kB/s up (25% of the line)" in said and "3 behind" in said
    assert [line.split() for line in said.splitlines() if "aaaaaaaa" in line or "bbbbbbbb" in line] == [
        ["aaaaaaaa", "0", "50", "kB/s", "1.5", "MB/s", "yes"], ["bbbbbbbb", "2", "0", "kB/s", "0", "kB/s", "NO"],
    ]  # fmt: skip
    path.write_text(json.dumps(told))
    done = barnraise(tmp_path, "status")
    assert done.returncode == 0 and "Ridge" in done.stdout


def test_verdict_is_signed_only_by_the_owners_machine(
    tmp_path,
):
    home = StateDir(tmp_path)
    spec = RunSpec(
        ModelSpec(1, 16, 1, 8, 256),
        TextSpec(tokenizer="bytes"),
        owner=home.identity.key,
        roots=("a" * 64,),
    )
    directive = home.identity.sign("directive", Problem(error="never read"))
    folder = home.open_run(RUN)  # locked, as by a worker
    ledger, previous = Ledger(folder.path), GENESIS_DIGEST
    for seq in (1, 2, 3):
        update = Update(
            run=RUN, peer="b" * 64, incarnation="c" * 16, seq=seq, previous=previous, tokens=10, total=10 * seq,
            fragments=[],
        )  # fmt: skip
        signed = home.identity.sign("update", update)
        previous = digest(signed.body)
        ledger.append(signed, update)

    def known(spec: RunSpec) -> None:
        view = RunView(id=RUN, slug="a-run", name="A", status="training", spec=spec.to_json())
        folder.save_message(
            JOIN_REPLY_FILE, JoinReply(run=view, ticket=None, directive=directive, peers=[])
        )

    known(spec)
    listed = barnraise(tmp_path, "verdict", "a-run")
    assert listed.returncode == 0 and update.author in listed.stdout, listed
    done = barnraise(
        tmp_path, "verdict", "a-run", "--peer", "b" * 12, "--after", "1", "--reason", "noise"
    )
    assert done.returncode == 0 and "Signed." in done.stdout, done
    (left,) = (folder.path / VERDICT_FOLDER).glob("*.json")
    rules = UpdateRules.from_spec(spec, RUN, frozenset(spec.roots))
    assert verify_proof(SignedVerdict.model_validate_json(left.read_bytes()), rules).limits == {
        update.author: 1
    }
    fails(
        barnraise(tmp_path, "verdict", "a-run", "--peer", "e" * 64), "is in this machine's ledger"
    )
    fails(barnraise(tmp_path, "verdict", "a-run", "--update", "x:1"), "is not KEY.LIFE:NUMBER")
    known(replace(spec, owner="d" * 64))
    fails(
        barnraise(tmp_path, "verdict", "a-run", "--peer", "b" * 64),
        "are signed by the machine dddddddd",
    )
    ledger.close()
    folder.close()
