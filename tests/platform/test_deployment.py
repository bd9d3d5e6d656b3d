"""Test a deployed configuration: checks, cookies for TLS alone, the mail URL, docs/deploy."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from django.core.management import call_command, get_commands
from helpers.network.local_server import LocalServer, QuietHandler
from helpers.paths import ROOT
from helpers.site import systemd_units
from helpers.site.guide_session import read_blocks

from coordinator.celery import app
from coordinator.demo.commands import BOUNDED_HEADERS, WITHOUT_PARTS
from coordinator.lib import mail_settings
from coordinator.lib.task_queues import TASK_QUEUE, WEBHOOK_QUEUE

DEPLOYED = {
    "BARNRAISE_HOSTS": "barn.example.org",
    "BARNRAISE_ORIGINS": "https://barn.example.org",
    "BARNRAISE_HTTPS": "1",
    "EMAIL_URL": "smtp://barn:a%40b@mail.example.org:587",
    "EMAIL_FROM": "Barnraise <barn@example.org>",
    "SECRET_KEY": "0123456789abcdefghijklmnop" * 2,
}
PRINT_SETTINGS = """
import json
from django.conf import settings as s
names = [
    "SESSION_COOKIE_SECURE", "CSRF_COOKIE_SECURE", "SESSION_COOKIE_HTTPONLY",
    "SECURE_HSTS_SECONDS", "SECURE_HSTS_INCLUDE_SUBDOMAINS", "DEBUG",
    "SECURE_SSL_REDIRECT", "EMAIL_HOST_PASSWORD",
    "SITE_URL", "MFA_WEBAUTHN_ALLOW_INSECURE_ORIGIN",
]
print(json.dumps({n: getattr(s, n) for n in names}))
"""


def manage(*command: str, **environment: str) -> subprocess.CompletedProcess:
    """Run manage.py with these environment variables."""
    paths = os.pathsep.join([str(ROOT / "platform"), str(ROOT / "worker")])
    return subprocess.run(
        [sys.executable, ROOT / "manage.py", *command],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_django_checks_find_nothing_in_a_deployed_site(state):
    done = manage("check", "--deploy", "--fail-level", "INFO", **DEPLOYED)
    assert done.returncode == 0, done.stderr
    assert "no issues" in done.stdout


@pytest.mark.django_db
def test_migrations_create_the_tables_of_the_models():
    call_command("makemigrations", check_changes=True, dry_run=True, verbosity=0)  # exits with 1


def test_deployed_site_requires_tls(state):
    values = json.loads(
        manage("shell", "-v", "0", "-c", PRINT_SETTINGS, **DEPLOYED).stdout.strip().splitlines()[-1]
    )
    assert values == {
        "SESSION_COOKIE_SECURE": True,
        "CSRF_COOKIE_SECURE": True,
        "SESSION_COOKIE_HTTPONLY": True,
        "SECURE_HSTS_SECONDS": 31_536_000,
        "SECURE_HSTS_INCLUDE_SUBDOMAINS": False,
        "DEBUG": False,
        "SECURE_SSL_REDIRECT": True,
        "EMAIL_HOST_PASSWORD": "a@b",
        "SITE_URL": "https://barn.example.org",
        "MFA_WEBAUTHN_ALLOW_INSECURE_ORIGIN": False,
    }


def test_hsts_duration_and_subdomains_are_settings(state):
    changed = {"BARNRAISE_HSTS": "3600", "BARNRAISE_HSTS_SUBDOMAINS": "yes"}
    shorter = manage("shell", "-v", "0", "-c", PRINT_SETTINGS, **DEPLOYED, **changed)
    values = json.loads(shorter.stdout.strip().splitlines()[-1])
    assert values["SECURE_HSTS_SECONDS"] == 3600 and values["SECURE_HSTS_INCLUDE_SUBDOMAINS"]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("console:", {"EMAIL_BACKEND": "console"}),
        ("file:///var/letters", {"EMAIL_BACKEND": "filebased", "EMAIL_FILE_PATH": "/var/letters"}),
        (
            "smtp://mail",
            {
                "EMAIL_BACKEND": "smtp",
                "EMAIL_PORT": 587,
                "EMAIL_USE_TLS": True,
                "EMAIL_USE_SSL": False,
            },
        ),
        (
            "smtp://mail:25?starttls=0",
            {"EMAIL_PORT": 25, "EMAIL_USE_TLS": False, "EMAIL_USE_SSL": False},
        ),
        (
            "smtps://u:p%2Fq@mail",
            {"EMAIL_PORT": 465, "EMAIL_USE_SSL": True, "EMAIL_HOST_PASSWORD": "p/q"},
        ),
    ],
)
def test_email_url_sets_the_mail_settings(url, expected):
    values = mail_settings.settings(url)
    values["EMAIL_BACKEND"] = values["EMAIL_BACKEND"].split(".")[-2]
    assert values.items() >= expected.items()


UVICORN = ("-m", "uvicorn", "coordinator.asgi:application", "--port", "0")


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (("manage.py", "doctor"), "BARNRAISE_PROXIES: 'nginx' is no address"),
        (("manage.py", "check", "--deploy"), "BARNRAISE_URL: 'https://lab.example/barn/' is"),
        ((*UVICORN, "--workers", "2"), "BARNRAISE_PROXIES: 'nginx' is no address"),
        ((*UVICORN, "--root-path", "/barn"), "--root-path or UVICORN_ROOT_PATH is set"),
    ],
)
def test_wrong_setting_ends_a_process_with_one_sentence(state, command, sentence):
    variable, _, rest = sentence.partition(": ")
    value = rest.split("'")[1] if "'" in rest else ""
    paths = os.pathsep.join([str(ROOT / "platform"), str(ROOT / "worker")])
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, variable: value},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert sentence in done.stderr and "Traceback" not in done.stderr
    if "--workers" not in command:  # then uvicorn says more, and ends its parent process
        assert done.returncode == 3 and done.stderr.count("\n") == 1
    if "/barn" in sentence or "root" in sentence:
        assert "needs a host name of its own" in done.stderr


# ---- the files of docs/deploy

DEPLOY = ROOT / "docs" / "deploy"
SERVICES = ("web", "celery", "webhooks", "beat")


def read_unit(name: str) -> systemd_units.Unit:
    return systemd_units.read_unit((DEPLOY / name).read_text())


def systemd_commands() -> dict[str, str]:
    units = {name: read_unit(f"barnraise-{name}.service")["Service"] for name in SERVICES}
    assert {unit["Restart"] for unit in units.values()} == {"always"}
    return {name: unit["ExecStart"] for name, unit in units.items()}


def procfile_commands() -> dict[str, str]:
    lines = (DEPLOY / "Procfile").read_text().splitlines()
    return dict(line.split(": ", 1) for line in lines)


def compose_commands() -> dict[str, str]:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    long_lived = {name: each for name, each in services.items() if name != "migrate"}
    assert {each["restart"] for each in long_lived.values()} == {"always"}
    assert all("healthcheck" in each for each in long_lived.values())
    assert all(each["logging"]["options"]["max-size"] for each in services.values())
    return {name: services[name]["command"] for name in SERVICES}


@pytest.mark.parametrize("read", [systemd_commands, procfile_commands, compose_commands])
def test_deploy_file_runs_the_four_services_with_commands_that_exist(read):
    commands = {name: shlex.split(command) for name, command in read().items()}
    assert set(commands) == set(SERVICES)
    for command in commands.values():
        program = Path(sys.executable).parent / Path(command[0]).name
        assert program.exists() and command[0].endswith(f".venv/bin/{program.name}")
        target = next(part for part in command if ":" in part and "coordinator" in part)
        module, _, name = target.partition(":")
        assert hasattr(import_module(module), name)
    for name in ("celery", "webhooks", "beat"):
        # At the level INFO there are two lines for each task, and a task begins each second.
        assert commands[name][commands[name].index("--loglevel") + 1] == "WARNING"
    for name, queue in (("celery", TASK_QUEUE), ("webhooks", WEBHOOK_QUEUE)):
        assert commands[name][commands[name].index("-Q") + 1] == queue
        assert set(WITHOUT_PARTS) <= set(commands[name])
    assert {"beat", "--pidfile="} <= set(commands["beat"])
    assert {"--no-proxy-headers", "--ws-max-size", *BOUNDED_HEADERS} <= set(commands["web"])


def test_every_documented_setting_reaches_the_containers():
    """But those that the compose file itself decides, which are its only other variables."""
    table = re.findall(r"^\| `([A-Z_]+)` \|", (ROOT / "docs" / "operate.md").read_text(), re.M)
    decided = {"DATABASE_URL", "REDIS_URL", "BARNRAISE_STATE"}
    assert len(table) > 20 and decided <= set(table)
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = compose["services"]
    gateway = compose["networks"]["default"]["ipam"]["config"][0]["gateway"]
    for name in (*SERVICES, "migrate"):
        file = DEPLOY / services[name]["env_file"]
        assert file.resolve() == ROOT / "barnraise.env", "the command of the guide passes this one"
        environment = services[name]["environment"]
        assert set(environment) == {*decided, "SECRET_KEY", "BARNRAISE_PROXIES"}
        assert environment["SECRET_KEY"] == "${SECRET_KEY:?}"
        # The setting of the file, and else the host, where a proxy's requests come from.
        assert environment["BARNRAISE_PROXIES"] == f"${{BARNRAISE_PROXIES:-{gateway}}}"
    # At the root, where every builder reads it.
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert "barnraise.env" in ignored, "its secrets are not part of the image"


def test_image_of_the_site_has_all_that_the_site_imports():
    left_out = re.search(r"grep -vE '\^\(([^)]+)\)", (DEPLOY / "Dockerfile").read_text())[1]
    imports = re.compile(rf"^\s*(?:import|from) (?:{left_out})\b", re.M)
    files = [
        *(ROOT / "platform").rglob("*.py"),
        *(ROOT / "worker/barnraise/protocol").rglob("*.py"),
    ]
    assert len(files) > 200
    assert not [path for path in files if imports.search(path.read_text())]


def test_image_leaves_out_tests_and_owns_its_volumes_by_fixed_ids():
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    left_out = re.search(r"grep -vE '\^\(([^)]+)\)", dockerfile)[1].split("|")
    assert {"pytest", "hypothesis", "libfaketime", "playwright"} <= set(left_out)
    assert "--uid 10001" in dockerfile and "--gid 10001" in dockerfile
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for name in (*SERVICES, "migrate"):
        for volume in compose["services"][name]["volumes"]:
            volume_name, folder = volume.split(":")
            assert volume_name in compose["volumes"] and folder in dockerfile
    assert "backups:/srv/barnraise/backups" in compose["services"]["web"]["volumes"]


def test_scrape_configuration_names_the_metrics_and_the_alarms():
    configuration = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    (job,) = configuration["scrape_configs"]
    assert job["metrics_path"] == "/metrics" and configuration["rule_files"] == ["alerts.yml"]
    guide = (ROOT / "docs" / "operate.md").read_text()
    assert f"BARNRAISE_METRICS_TOKEN={job['authorization']['credentials']}\n" in guide


def test_compose_file_restarts_background_parts_that_stand_still():
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for name in ("celery", "webhooks", "beat"):
        # Without an init process a signal from inside the container does not end its first one.
        assert services[name]["init"] is True
        check = services[name]["healthcheck"]["test"]
        _, program, reaction = check.split('"')
        compile(program, "check", "exec")
        assert "/readyz" in program and "75 if status == 503" in program
        assert "test $$? -ne 75 || kill -9 -1" in reaction


def test_unit_of_the_embedded_servers_runs_a_module_that_exists():
    service = read_unit("barnraise-servers.service")["Service"]
    program, option, module, state = service["ExecStart"].split()
    assert (
        program.endswith(".venv/bin/python") and option == "-m" and service["Restart"] == "always"
    )
    assert hasattr(import_module(module), "serve")
    guide = (ROOT / "docs" / "operate.md").read_text()
    assert f"BARNRAISE_STATE={state}\n" in guide


def test_health_check_asks_and_restarts_services_that_exist():
    command = read_unit("barnraise-health.service")["Service"]["ExecStart"]
    restarted = re.search(r"try-restart ([^;]+);", command)[1].split()
    assert "/readyz" in command and restarted
    assert all((DEPLOY / f"{name}.service").exists() for name in restarted)
    assert read_unit("barnraise-health.timer")["Timer"]["OnUnitActiveSec"] == "1min"


@pytest.mark.parametrize(
    ("status", "code", "restarted"),
    [
        (200, 0, ""),
        (503, 1, "barnraise-celery barnraise-webhooks barnraise-beat"),
        (400, 1, ""),
        (None, 1, "barnraise-web"),
    ],
)
def test_health_check_restarts_what_stands_still(tmp_path, status, code, restarted):
    requested = []

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            requested.append(self.path)
            if status:  # without one the connection ends
                self.send_response(status)
                self.end_headers()

    systemctl = tmp_path / "systemctl"
    systemctl.write_text(f"#!/bin/sh\necho $* > {tmp_path}/called\n")
    systemctl.chmod(0o755)
    server = LocalServer(Handler)
    words = systemd_units.read_command(read_unit("barnraise-health.service"))
    command = [word.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}") for word in words]
    paths = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(command, env={"PATH": paths}, capture_output=True, check=False)
    server.close()
    assert requested == ["/readyz"] and done.returncode == code
    called = tmp_path / "called"
    assert (called.read_text() if called.exists() else "") == (
        f"try-restart {restarted}\n" if restarted else ""
    )


def test_environment_file_of_the_guide_is_read_by_shells_and_systemd(tmp_path):
    block = re.search(r"```sh\n(PYTHONPATH=.*?)```", (ROOT / "docs/operate.md").read_text(), re.S)
    assert block
    file = tmp_path / "barnraise.env"
    file.write_text(block[1])
    names = [line.partition("=")[0] for line in block[1].splitlines()]
    print_all = "import json, os; print(json.dumps(dict(os.environ)))"
    script = f"set -ea; . {file}; {sys.executable} -c '{print_all}'"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    by_shell = json.loads(done.stdout)
    by_systemd = systemd_units.read_environment(block[1])
    assert {name: by_shell[name] for name in names} == by_systemd
    assert by_systemd["EMAIL_FROM"] == "Barnraise <barn@example.org>"


def test_every_block_of_the_operators_guide_has_its_grammar():
    blocks = read_blocks()
    assert {block.language for block in blocks} == {"sh", "ini"} and len(blocks) > 10
    assert sum(block.is_environment_file for block in blocks) == 1
    for block in blocks:
        if block.language == "ini":
            assert block.text in (DEPLOY / "barnraise-web.service").read_text()
        else:
            command = ["sh", "-n", "/dev/stdin"]
            done = subprocess.run(command, input=block.text, text=True, capture_output=True)
            assert (done.returncode, done.stderr) == (0, ""), block.text


def test_backup_runs_every_night_and_keeps_some():
    command = read_unit("barnraise-backup.service")["Service"]["ExecStart"]
    assert "manage.py backup" in command and "--keep" in command
    timer = read_unit("barnraise-backup.timer")["Timer"]
    assert timer["Persistent"] == "yes" and timer["OnCalendar"]


def test_units_are_valid_for_systemd(tmp_path):
    """By its own program where that is; else by their sections and keys."""
    units = sorted(DEPLOY.glob("barnraise-*"))
    for unit in units:
        text = unit.read_text().replace("/srv/barnraise/site", str(ROOT))
        (tmp_path / unit.name).write_text(text)
        sections = systemd_units.read_unit(text)
        for name in sections.sections():
            assert set(sections[name]) <= systemd_units.KEYS[name], unit.name
    if verifier := shutil.which("systemd-analyze"):
        command = [verifier, "verify", "--man=no", *sorted(tmp_path.iterdir())]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = [line for line in done.stderr.splitlines() if "barnraise" in line]
        assert (done.returncode, found) == (0, [])


def parse_braces(text: str, end: str) -> list[tuple]:
    """Parse the grammar of nginx, whose directives end with `;`, or Caddy, with lines' ends.

    Returns:
        Each directive's words and the directives of its block.
    """
    blocks: list[list[tuple]] = [[]]
    words: list[str] = []
    for token in re.findall(r"#.*|\{\$?[^\s{}]+\}\S*|'[^']*'|[{};\n]|[^\s{};']+", text):
        if token == "{":
            assert words, "a block without a name"
            blocks[-1].append((words, []))
            blocks.append(blocks[-1][-1][1])
            words = []
        elif token == "}":
            assert not words and len(blocks) > 1, f"{words} before }}"
            blocks.pop()
        elif token == end and words:
            blocks[-1].append((words, []))
            words = []
        elif token not in (end, "\n") and token[0] != "#":
            words.append(token)
    assert len(blocks) == 1 and not words, words
    return blocks[0]


# The directives that docs/deploy may use, by their block.
NGINX = {
    "": {"map", "server"},
    "server": {"listen", "server_name", "ssl_certificate", "ssl_certificate_key", "location"}
    | {"client_max_body_size", "gzip", "gzip_types", "return"},
    "location": {"return", "proxy_pass", "proxy_http_version", "proxy_set_header"}
    | {"proxy_read_timeout", "proxy_buffering"},
    "map": {"default", "''"},
}
CADDY = {
    "": {"{$BARNRAISE_HOST:localhost}"},
    "{$BARNRAISE_HOST:localhost}": {
        "@inside",
        "respond",
        "encode",
        "request_body",
        "reverse_proxy",
    },
    "request_body": {"max_size"},
    "reverse_proxy": {"header_up"},
}


@pytest.mark.parametrize(
    ("name", "end", "known"), [("Caddyfile", "\n", CADDY), ("nginx.conf", ";", NGINX)]
)
def test_proxy_configuration_has_its_grammar_and_known_directives(name, end, known):
    def check(block: str, directives: list[tuple]) -> None:
        for words, inner in directives:
            assert words[0] in known[block], (block, words)
            check(words[0], inner)

    check("", parse_braces((DEPLOY / name).read_text(), end))


@pytest.mark.parametrize("name", ["Caddyfile", "nginx.conf"])
def test_proxy_hides_inner_addresses_and_passes_what_the_site_needs(name):
    text = (DEPLOY / name).read_text()
    assert all(path in text for path in ("healthz", "readyz", "metrics", "404"))
    assert "X-Forwarded-Proto" in text and "127.0.0.1:8000" in text
    if name == "nginx.conf":  # Caddy does both by itself
        assert "proxy_set_header Upgrade" in text
        assert "X-Forwarded-For $remote_addr" in text and "proxy_add" not in text


@pytest.mark.django_db
def test_board_and_alarms_use_metrics_and_labels_that_exist(valkey, client):
    client.get("/runs/")
    app.tasks["accounts.clear_expired_sessions"].apply()
    served = client.get("/metrics").content.decode()
    families = set(re.findall(r"^# TYPE (\w+)", served, re.M))
    labels = set(re.findall(r'[{,](\w+)="', served))
    rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"][0]["rules"]
    board = json.loads((DEPLOY / "grafana.json").read_text())
    expressions = [rule["expr"] for rule in rules]
    expressions += [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    for expression in expressions:
        named = re.findall(r"\bbarnraise_\w+", expression)
        assert {name.removesuffix("_bucket") for name in named} <= families, expression
        used = re.findall(r"by \(([^)]+)\)", expression)
        used = {label.strip() for group in used for label in group.split(",")}
        used |= set(re.findall(r'[{,](\w+)=~?"', expression)) - {"job"}
        assert used <= labels, expression
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_documents_name_management_commands_that_exist():
    texts = [(ROOT / "docs" / name).read_text() for name in ("site.md", "operate.md")]
    texts += [path.read_text() for path in DEPLOY.iterdir()]
    named = {name for text in texts for name in re.findall(r"manage\.py ([a-z_]+)", text)}
    assert "run_site" in named and named <= set(get_commands())


def test_guide_to_a_site_starts_no_command_without_supervision():
    guide = (ROOT / "docs" / "site.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", guide, re.S)
    assert blocks and not any("celery -A" in block or "uvicorn" in block for block in blocks)
