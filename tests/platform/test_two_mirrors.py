"""Two real mirrors: servers, databases and keys of their own, and nothing between them but HTTP."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psycopg
import pytest

from coordinator.demo.processes import Family, free_port

ROOT = Path(__file__).parents[2]


class Site:
    """One mirror. `manage` runs a command there; `start` and `kill` its web server."""

    def __init__(self, name: str, folder: Path, valkey: int):
        self.name, self.port = name, free_port(31_000 + valkey * 100)
        self.url = f"http://127.0.0.1:{self.port}"
        (folder / name).mkdir()
        self.family = Family(folder / name / "logs")
        self.environment = {
            "DATABASE_URL": re.sub(r"/barnraise(?=\?|$)", f"/mirror_{name}", os.environ["DATABASE_URL"]),
            "REDIS_URL": re.sub(r"/0$", f"/{valkey}", os.environ["REDIS_URL"]),
            "BARNRAISE_STATE": str(folder / name),
            "BARNRAISE_NAME": f"Mirror {name}",
        }

    def manage(self, *command: str, fails: bool = False) -> str:
        done = subprocess.run(
            [sys.executable, ROOT / "manage.py", *command], env={**os.environ, **self.environment},
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done.stdout + (done.stderr if fails else "")

    def shell(self, code: str) -> str:
        return self.manage("shell", "-v", "0", "-c", code).strip().splitlines()[-1]

    def start(self) -> None:
        serve = ("-m", "uvicorn", "coordinator.asgi:application", "--host", "127.0.0.1", "--port", str(self.port))
        self.family.start("site", sys.executable, *serve, "--no-access-log", **self.environment)
        end = time.monotonic() + 120
        while True:
            try:
                if httpx.get(f"{self.url}/api/v1/mirror", timeout=2).status_code == 200:
                    return
            except httpx.HTTPError:
                assert time.monotonic() < end, self.family.last_words("site")
            time.sleep(0.2)

    def kill(self) -> None:
        site = self.family.children.pop("site")
        site.kill()
        site.wait()


@pytest.fixture
def sites(state, tmp_path):
    made = [Site("a", tmp_path, 2), Site("b", tmp_path, 3)]
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as connection:
        connection.execute("CREATE DATABASE mirror_a")
        made[0].manage("migrate", "--verbosity", "0")
        connection.execute("CREATE DATABASE mirror_b TEMPLATE mirror_a")
        yield made
        for site in made:
            site.family.stop()
        for site in made:
            connection.execute(f"DROP DATABASE mirror_{site.name} WITH (FORCE)")


def people(site: Site) -> str:
    return site.shell(
        "from coordinator.accounts.models import User; print(sorted(User.objects.values_list('name', flat=True)))"
    )


def pulled(site: Site) -> str:
    """Its state hash after a pull that nothing was wrong with."""
    lines = site.manage("mirror", "pull").strip().splitlines()
    assert not [line for line in lines if line.startswith("  ")], lines
    return lines[-1]


def test_a_second_mirror_begins_from_the_first_and_each_goes_on_while_the_other_is_dead(sites, tmp_path):
    a, b = sites
    file, root = str(tmp_path / "list.json"), str(tmp_path / "root")
    key = a.manage("mirrors", "keygen", root).strip()
    a.manage("mirrors", "begin", "--url", a.url, "--name", "A", "--root", key, "--threshold", "1", "--to", file)
    theirs = b.shell("from coordinator import mirror; print(mirror.identity().key)")
    a.manage("mirrors", "add", "--key", theirs, "--url", b.url, "--name", "B", "--to", file)
    a.manage("mirrors", "sign", file, "--key", root)
    a.manage("mirrors", "publish", file, "--first")
    digest = re.search(r"BLAKE3 (\w{64})", a.manage("mirrors", "show"))[1]
    a.manage("prepare_owner", "--email", "ida@example.org", "--password", "raise-the-frame-7", "--name", "Ida")
    a.start()
    assert "Nothing was taken" in b.manage("mirror", "join", a.url, "--list", "0" * 64, fails=True)
    joined = b.manage("mirror", "join", a.url, "--list", digest).strip().splitlines()[-1]
    assert "Ida" in people(b), "what events only name by a digest has come, too"

    a.kill()
    assert "does not answer" in b.manage("mirror", "pull")
    b.manage("prepare_owner", "--email", "bob@example.org", "--password", "raise-the-frame-7", "--name", "Bob")
    b.start()
    there = pulled(a)
    assert there != joined and "Bob" in people(a) and "Ida" in people(a)
    a.start()
    assert pulled(b) == there, "one state on both"
