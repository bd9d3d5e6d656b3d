"""Test the commands that install the worker, and the wheel that the site offers."""

import hashlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from django.test import Client
from helpers.paths import ROOT, WORKER
from packaging.requirements import Requirement
from pydantic import ValidationError

from barnraise.protocol.coordinator_messages import WorkerRelease
from barnraise.protocol.messages import Signed
from barnraise.protocol.signing import open_signed
from coordinator.lib import site_identity
from coordinator.web.build_wheel import format_constraints
from coordinator.web.install_lines import HARDWARE, SYSTEMS, detect_system, install_choices

PROJECT = tomllib.loads((WORKER / "pyproject.toml").read_text())["project"]
URL = "https://barn.example.org/download/barnraise-0.1.0-py3-none-any.whl"
DIGEST = "ab" * 32
CHECKED = f"{URL}#sha256={DIGEST}"
CONSTRAINTS = "https://barn.example.org/download/constraints.txt"
WINDOWS = "Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36"
MAC = "Mozilla/5.0 (Macintosh; Intel Mac OS X 10_15_7) AppleWebKit/605.1.15"
PHONE = "Mozilla/5.0 (iPhone; CPU iPhone OS 18_0 like Mac OS X) AppleWebKit/605 Mobile/15E148"


@pytest.fixture
def offered_wheel(settings, tmp_path, built_frontend) -> Path:
    """Let the site offer a small file as its wheel."""
    settings.WHEEL_DIR = tmp_path
    wheel = tmp_path / "barnraise-1.2.3-py3-none-any.whl"
    wheel.write_bytes(b"a wheel")
    (tmp_path / "constraints.txt").write_text("# Tested.\nnumpy==2.4.6\n")
    return wheel


def test_every_system_and_hardware_has_a_command_or_a_reason():
    choices = {(c.system, c.hardware): c for c in install_choices(URL, CONSTRAINTS, DIGEST)}
    assert set(choices) == {(system, hardware) for system in SYSTEMS for hardware in HARDWARE}
    for choice in choices.values():
        assert choice.note if not choice.uv else choice.uv.endswith(f"{CONSTRAINTS} {CHECKED}")
        assert bool(choice.size) == bool(choice.uv)
        assert not choice.uv or " --python 3.13 " in choice.uv
    assert "--torch-backend=cpu" in choices["linux", "cpu"].uv
    assert "--torch-backend=auto" in choices["windows", "nvidia"].uv
    assert "/cu130" in choices["windows", "nvidia"].pipx, "the default build there is for CPUs"
    pipx = f'pipx install --pip-args="--constraint {CONSTRAINTS}" {CHECKED}'
    assert choices["linux", "nvidia"].pipx == pipx
    assert not choices["windows", "amd"].uv
    assert "install for the CPU" in choices["macos", "amd"].note


@pytest.mark.parametrize(
    ("user_agent", "system"),
    [
        (WINDOWS, "windows"),
        (MAC, "macos"),
        (PHONE, "linux"),
        ("X11; Linux", "linux"),
        ("", "linux"),
    ],
)
def test_detect_system_reads_the_browser(user_agent, system):
    assert detect_system(user_agent) == system


@pytest.mark.django_db
def test_pages_offer_the_wheel_of_this_site(offered_wheel, valkey):
    client = Client(headers={"User-Agent": WINDOWS})
    for path in ("/", "/download/"):
        page = client.get(path).content.decode()
        assert f"http://testserver/download/{offered_wheel.name}" in page
        assert 'value="windows" checked' in page and "Windows on ARM" in page
        assert "Downloads 170 MB." in page
    sha256 = hashlib.sha256(b"a wheel").hexdigest()
    assert sha256 in client.get("/download/").content.decode()
    sent = client.get(f"/download/{offered_wheel.name}")
    assert sent.content == b"a wheel" and sent["ETag"] == f'"{sha256}"'
    assert client.get("/download/constraints.txt").content == b"# Tested.\nnumpy==2.4.6\n"
    for name in ("barnraise-1.2.2-py3-none-any.whl", "settings.py", "..%2fsettings.py"):
        assert client.get(f"/download/{name}").status_code == 404


@pytest.mark.django_db
def test_site_signs_version_digest_and_constraints_of_its_wheel(offered_wheel, valkey):
    signed = Signed.model_validate_json(Client().get("/api/v1/worker").content)
    own_key = site_identity.identity().key
    release = open_signed(signed, "worker_release", WorkerRelease, own_key)
    assert (release.version, release.file, release.size) == ("1.2.3", offered_wheel.name, 7)
    assert release.sha256 == hashlib.sha256(b"a wheel").hexdigest()
    assert release.constraints == ["numpy==2.4.6"]


@pytest.mark.django_db
def test_site_without_a_wheel_says_how_to_build_one(settings, tmp_path, valkey, built_frontend):
    settings.WHEEL_DIR = tmp_path / "nothing"
    assert "make wheel" in Client().get("/download/").content.decode()
    for name in ("barnraise-1.2.3-py3-none-any.whl", "constraints.txt"):
        assert Client().get(f"/download/{name}").status_code == 404


def test_constraints_are_the_pins_without_extras_and_comments():
    pins = (
        "torch==2.13.0\nredis[hiredis]==8.1.0   # its replies\n"
        'miniupnpc==2.3.3 ; sys_platform != "darwin" and python_version < "3.14"  # routers\n'
    )
    assert format_constraints(pins).splitlines()[1:] == [
        'miniupnpc==2.3.3 ; sys_platform != "darwin" and python_version < "3.14"',
        "redis==8.1.0",
        "torch==2.13.0",
    ]
    requirements = (ROOT / "requirements.txt").read_text()
    pinned = [line for line in requirements.splitlines() if line and line[0] != "#"]
    constraints = format_constraints(requirements).splitlines()[1:]
    assert len(constraints) == len(pinned)
    release = WorkerRelease(
        version="1.0", file="barnraise-1.whl", size=1, sha256=DIGEST, constraints=constraints
    )
    for foreign in ("numpy @ https://elsewhere/x.whl", "--index-url=https://elsewhere", "numpy>=2"):
        with pytest.raises(ValidationError):
            WorkerRelease.model_validate({**dict(release), "constraints": [foreign]})
    for needed in map(Requirement, PROJECT["dependencies"]):
        (tested,) = [line for line in map(Requirement, constraints) if line.name == needed.name]
        (version,) = tested.specifier
        assert needed.specifier.contains(version.version) and tested.marker == needed.marker


def test_wheel_has_the_licence_of_the_repository():
    assert (WORKER / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.slow
def test_built_wheel_has_the_same_bytes_each_time_and_installs(tmp_path):
    command = [sys.executable, ROOT / "platform" / "coordinator" / "web" / "build_wheel.py"]
    digests = set()
    for _ in range(2):
        built = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        digests.add(hashlib.sha256(Path(built).read_bytes()).hexdigest())
    assert len(digests) == 1
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--target", tmp_path, built], check=True)
    assert (tmp_path / "barnraise" / "__main__.py").exists()
    assert (tmp_path / "barnraise" / "py.typed").exists()
    (information,) = tmp_path.glob("barnraise-*.dist-info")
    metadata = (information / "METADATA").read_text()
    assert "Requires-Python: <3.15,>=3.11" in metadata and "# Barnraise, the worker" in metadata
    assert (information / "licenses" / "LICENSE").exists()
