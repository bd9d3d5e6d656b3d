"""The blueprint's conventions, as tests: who may import whom, what must not exist, and a README whose tree is true."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORKER, PLATFORM = ROOT / "worker" / "barnraise", ROOT / "platform" / "coordinator"
# What anything may build on.
GROUND = {
    "database",
    "wire",
    "figures",
    "rulings",
    "terms",
    "states",
    "errors",
    "identity",
    "spec",
    "__init__",
}

# What each module of the worker may import of the worker, besides GROUND.
MAY_IMPORT = {
    "database": set(),
    "wire": set(),
    "figures": set(),
    "rulings": set(),
    "terms": set(),
    "states": set(),
    "errors": set(),
    "spec": set(),
    "identity": set(),
    "hardware": set(),
    "costs": {"hardware"},
    "limits": set(),
    "plan": set(),
    "footprint": {"costs", "plan"},
    "planner": {"costs", "footprint", "hardware", "limits", "plan", "swap"},  # of swap what is pure
    "model": set(),
    "data": set(),
    "parquet": set(),
    "sources": {"data", "parquet"},
    "checkpoint": {"model", "swap"},
    "swap": {"costs", "hardware", "limits", "model", "plan", "swap"},
    "mirrors": set(),
    "mirrored": {"coordinator", "home", "mirrors"},
    "exchange": {"exchange", "mirrors"},
    "home": {"limits"},
    "coordinator": {"home", "mirrors"},
    "report": {"coordinator"},
    "progress": {"report"},
    "restore": {"checkpoint", "exchange", "plan", "swap"},
    "gathering": {"exchange"},
    "view": {"hardware", "plan", "swap"},
    "enter": {"coordinator", "mirrored", "data", "exchange", "home", "sources"},
    "run": {
        "checkpoint", "data", "enter", "exchange", "gathering", "hardware", "limits", "plan", "planner", "progress",
        "report", "restore", "swap", "telling", "view",
    },
    "telling": {"enter", "exchange", "home", "plan", "progress", "report", "witnessing"},
    "witnessing": {"exchange"},
    "visiting": {"run"},
    "starting": {"checkpoint", "enter", "exchange", "hardware", "home", "restore", "visiting"},
    "probe": {"hardware", "swap"},
    "planning": {"hardware", "home", "limits", "planner", "probe", "view"},
    "judging": {"enter", "exchange", "home", "planning"},
    "account": {"coordinator", "home"},
    "scripting": {"account", "coordinator", "home", "limits", "planning"},
    "cli": {
        "checkpoint", "coordinator", "enter", "exchange", "home", "judging", "planning", "restore", "run", "scripting",
        "starting", "visiting",
    },
    "__main__": {"cli"},
    "__init__": set(),
}  # fmt: skip
WITHIN_GROUND = {
    "errors": set(), "spec": {"errors"}, "states": set(), "terms": set(), "figures": {"states", "terms"},
    "rulings": {"terms"},
    "wire": {"figures", "rulings", "states", "terms"}, "identity": {"errors", "wire"},
}  # fmt: skip
# The standard library and torch alone: the engine runs on any PyTorch machine.
BARE = {
    "spec",
    "hardware",
    "probe",
    "costs",
    "limits",
    "plan",
    "footprint",
    "planner",
    "model",
    "swap",
}
SITE_MAY_USE = {  # torch-free
    "wire", "rulings", "errors", "identity", "spec", "hardware", "costs", "limits", "mirrors", "plan", "planner",
}  # fmt: skip
# The estimate of a new run reckons as machines would: closed forms, without torch and without anything of a network.
SITE_MAY_USE_OF_EXCHANGE = (
    "barnraise.exchange.pacing.round_schedule.",
    "barnraise.exchange.compression.scheme.",
)
# Each imports only what is left of it…
SITE_ORDER = ["audit", "mirrors", "accounts", "tokens", "runs", "fleet", "telemetry", "notify"]
SITE_LEAVES = {"live", "api", "web", "staff", "demo"}  # …and these whatever they need


def sources(root: Path) -> list[Path]:
    return sorted(p for p in root.rglob("*.py") if "node_modules" not in p.parts)


def imports(path: Path) -> set[str]:
    """Dotted names of all that a file imports, wherever in it; `from a import b` counts as a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.relative_to(ROOT)} imports relatively"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def module(path: Path, root: Path) -> str:
    return path.relative_to(root).parts[0].removesuffix(".py")


def names(found: set[str], package: str) -> set[str]:
    """First-level modules of `package` among what was imported."""
    return {name.split(".")[1] for name in found if name.startswith(f"{package}.")}


@pytest.mark.parametrize("path", sources(WORKER), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_worker_imports_only_what_the_blueprint_allows(path):
    here, found = module(path, WORKER), imports(path)
    allowed = MAY_IMPORT[here] | WITHIN_GROUND.get(here, GROUND) | {"__version__"}
    assert names(found, "barnraise") <= allowed
    assert not {name for name in found if name.split(".")[0] in ("coordinator", "django")}
    if here in BARE:
        import sys

        outside = (
            {name.split(".")[0] for name in found}
            - set(sys.stdlib_module_names)
            - {"torch", "barnraise"}
        )
        assert not outside, f"{here} must run on a bare PyTorch machine"
    if here == "spec":
        assert "torch" not in {name.split(".")[0] for name in found}


@pytest.mark.parametrize("path", sources(PLATFORM), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_site_imports_leftward_and_never_torch(path):
    here, found = module(path, PLATFORM), imports(path)
    assert "torch" not in {name.split(".")[0] for name in found}
    told = {name for name in found if not name.startswith(SITE_MAY_USE_OF_EXCHANGE)}
    assert names(told, "barnraise") <= SITE_MAY_USE | {"__version__"}
    apps = names(found, "coordinator") & {*SITE_ORDER, *SITE_LEAVES}
    if here in SITE_ORDER:
        assert apps <= set(SITE_ORDER[: SITE_ORDER.index(here) + 1])
    elif here in SITE_LEAVES:
        assert apps <= {*SITE_ORDER, here} | ({"live"} if here == "web" else set())


def test_nothing_shadows_the_standard_library_or_breaks_test_imports():
    assert not (ROOT / "platform" / "__init__.py").exists()
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_the_top_level_is_the_agreed_one():
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    agreed = {
        "platform", "worker", "frontend", "tests", "docs", "benchmarks", ".ci", "manage.py", "requirements.txt",
        "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "Makefile", "pyproject.toml", ".gitignore",
    }  # fmt: skip
    assert {name.split("/")[0] for name in listed} <= agreed


def tree() -> dict[str, str]:
    """Path → line of the README's tree, which nests by two spaces."""
    block = re.search(r"```tree\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert block, "README.md has no ```tree block"
    found, folders = {}, []
    for line in block[1].splitlines():
        name, text = re.fullmatch(r"( *\S+)(?:\s+(.*))?", line).groups()
        depth = (len(name) - len(name.lstrip())) // 2
        folders[depth:] = [name.strip().rstrip("/")]
        found["/".join(folders)] = text or ""
    return found


def test_the_readmes_tree_is_the_tree():
    """Every file of ours with code in it is there, with a line that says what it is; nothing is there that is not."""
    told = tree()
    for path, text in told.items():
        assert (ROOT / path).exists(), f"the README speaks of {path}, which does not exist"
        assert text, f"the README says nothing about {path}"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "worker", "platform", "frontend/src"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    quiet = ("__init__.py", "apps.py", "/migrations/", "/management/", ".test.ts")
    for path in listed:
        if (
            path.endswith((".py", ".ts"))
            and not any(part in path for part in quiet)
            and (ROOT / path).exists()
        ):
            covered = path in told or any(
                path.startswith(f"{folder}/") for folder in told if folder in SUMMED
            )
            assert covered, f"{path} is not in the README's tree"


SUMMED = {"frontend/src"}  # folders that one line speaks for


def test_no_file_is_too_long_to_be_one_noun():
    long = {
        str(p.relative_to(ROOT)): n
        for p in [*sources(WORKER), *sources(PLATFORM)]
        if (n := len(p.read_text().splitlines())) > 400
    }
    assert not long, long
