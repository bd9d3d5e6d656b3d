"""Run the code blocks of docs/operate.md as its reader does, in a folder and on servers of a test.

What cannot run here is a stand-in on the PATH, which `STAND_INS` names with the reason; the test
sees what it was called with. Everything else is the real program.
"""

import os
import re
import select
import subprocess
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from helpers.network.local_server import LocalServer, QuietHandler
from helpers.paths import ROOT

GUIDE = ROOT / "docs" / "operate.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
ASSIGNMENTS = re.compile(r"([A-Z_]+=.*\n)+")
STAND_INS = {
    "sudo": "needs root: it only changes to Postgres's superuser",
    "useradd": "needs root",
    "systemctl": "needs systemd as the first process: the services' commands run without it",
    "git": "needs the address of a repository",
    "make": "downloads; whether the target exists is asked",
    "docker": "no engine: the arguments are compared with the compose file",
}
SUDO = """#!/bin/sh
case "$1" in
-iu) exit;;
-u) export PGUSER="$2"; shift 2;;
esac
exec "$@"
"""
# Each argument in a line of its own.
CALL = """#!/bin/sh
IFS='
'
exec curl --silent --show-error --fail --data-binary "$*" http://127.0.0.1:{port}/{name}
"""
# As the guide says; the next commands use it.
COMPOSE = 'compose() { docker compose -f docs/deploy/compose.yaml --env-file barnraise.env "$@"; }'
# What is typed at which prompt.
ANSWERS = {
    b"for new role: ": "password",
    b"Enter it again: ": "password",
    b"Password: ": "raise-the-frame-7",
    b"\nAgain: ": "raise-the-frame-7",
}
STATUS = re.compile(r"^<(\d+): (\d+)>\r?$", re.M)
PATIENCE = 300.0  # seconds without any output


@dataclass(frozen=True)
class Block:
    """A code block of a document."""

    language: str
    text: str

    @property
    def is_environment_file(self) -> bool:
        """Whether it holds nothing but assignments."""
        return bool(ASSIGNMENTS.fullmatch(self.text))


def read_blocks() -> list[Block]:
    """Return the guide's code blocks in order."""
    return [Block(*found) for found in BLOCK.findall(GUIDE.read_text())]


@dataclass(frozen=True)
class Ports:
    """Where the test's servers listen instead of the guide's."""

    web: int
    postgres: int
    valkey: int


class GuideSession:
    """One shell that runs all blocks.

    Args:
        folder: Stands for / in all paths of the guide.
        ports: Of the test's servers.
        environment: Of the shell.
        systemctl: Does what `systemctl` would with its arguments.
    """

    def __init__(
        self,
        folder: Path,
        ports: Ports,
        environment: dict[str, str],
        systemctl: Callable[..., None],
    ):
        self.calls: dict[str, list[list[str]]] = defaultdict(list)
        self.output = ""
        self.failed: list[str] = []  # lines whose last command did not succeed
        self._folder = folder
        self._ports = ports
        self._systemctl = systemctl
        self.home = folder / "srv" / "barnraise"
        for path in (self.home, folder / "etc/systemd/system", folder / "bin"):
            path.mkdir(parents=True)
        self._server = LocalServer(self._handler())
        for name in STAND_INS:
            script = folder / "bin" / name
            call = CALL.format(port=self._server.port, name=name)
            script.write_text(SUDO if name == "sudo" else call)
            script.chmod(0o755)
        self._environment = {
            **environment,
            "HOME": str(self.home),
            "PATH": f"{folder / 'bin'}:{environment['PATH']}",
        }

    def place(self, text: str) -> str:
        """Translate the guide's paths, addresses and dates to those of the test."""
        for old, new in {
            "/srv/barnraise": str(self.home),
            "/etc/": f"{self._folder}/etc/",
            "smtp://user:password@mail.example.org:587": f"file://{self._folder}/letters",
            "127.0.0.1:8000": f"127.0.0.1:{self._ports.web}",
            "--port 8000": f"--port {self._ports.web}",
            ":5432/": f":{self._ports.postgres}/",
            ":6379/": f":{self._ports.valkey}/",
            "2026-11-21": date.today().isoformat(),
        }.items():
            text = text.replace(old, new)
        return text

    def run(self, blocks: list[Block]) -> None:
        """Run shell blocks in one shell, and note each line that fails."""
        script, lines = [COMPOSE], []
        for block in blocks:
            text = self.place(block.text)
            if block.is_environment_file:
                (self._folder / "etc/barnraise.env").write_text(text)
                continue
            for line in text.splitlines():
                script += [line, f'printf "\\n<%s: %s>\\n" {len(lines)} $?']
                lines.append(line)
        file = self._folder / "session.sh"
        file.write_text("\n".join(script))
        self.output = self._type(["sh", str(file)])
        statuses = STATUS.findall(self.output)
        assert len(statuses) == len(lines), self.output
        self.failed = [lines[int(number)] for number, status in statuses if status != "0"]

    def close(self) -> None:
        """End the server of the stand-ins."""
        self._server.close()

    def _type(self, command: list[str]) -> str:
        """Run a command at a terminal, answer its prompts, and return what it shows."""
        ours, its = os.openpty()
        process = subprocess.Popen(
            command,
            stdin=its,
            stdout=its,
            stderr=its,
            cwd=self.home,
            env=self._environment,
            start_new_session=True,
        )
        os.close(its)
        shown = b""
        try:
            while select.select([ours], [], [], PATIENCE)[0]:
                shown += os.read(ours, 1 << 16)
                for prompt, answer in ANSWERS.items():
                    if shown.endswith(prompt):
                        os.write(ours, f"{answer}\n".encode())
        except OSError:  # Linux's end of a terminal
            pass
        finally:
            process.kill()
            process.wait()
            os.close(ours)
        return shown.decode(errors="replace")

    def _handler(self) -> type[QuietHandler]:
        session = self

        class Handler(QuietHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                try:
                    answer = session._answer(self.path.strip("/"), body.split("\n"))
                    self.send_response(200)
                except Exception as error:  # the shell shows it, and the line fails
                    answer = repr(error)
                    self.send_response(500, answer)
                self.end_headers()
                self.wfile.write(answer.encode())

        return Handler

    def _answer(self, name: str, arguments: list[str]) -> str:
        self.calls[name].append(arguments)
        if name == "systemctl":
            self._systemctl(*arguments)
        elif name == "make":
            planned = ["make", "--dry-run", *arguments]
            subprocess.run(planned, cwd=ROOT, capture_output=True, check=True)
        elif name == "git" and arguments[0] == "clone":
            site = self.home / arguments[-1]
            site.mkdir()
            for path in ROOT.iterdir():
                if path.name != "barnraise.env":
                    (site / path.name).symlink_to(path)
        return ""
