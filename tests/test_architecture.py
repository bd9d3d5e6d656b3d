"""The rules that keep the code base legible: layers, names, language, and what must not exist."""

import ast
import hashlib
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from helpers.paths import ROOT, TESTS

# One process reads all files, once.
pytestmark = pytest.mark.xdist_group("architecture")

WORKER, PLATFORM = ROOT / "worker" / "barnraise", ROOT / "platform" / "coordinator"

# A linter's or type checker's finding that a line silences, and what follows.
IGNORED_FINDING = re.compile(r"# (?:noqa: \w+|(?:type|pyright): ignore(?:\[\w+\])?)(.*)$")
# One word for ten different acts: the field says publish, send, receive, request, store, load.
BANNED_VERBS = {
    "tell",
    "told",
    "take",
    "taken",
    "say",
    "said",
    "hear",
    "heard",
    "keep",
    "kept",
    "settle",
    "note",
    "put",
    "give",
    "ask",
    "own",
    "know",
    "known",
    "hold",
    "held",
    "named",
    "begin",
}
# The packages whose constants are counted: they were one package with 433 of them.
EXCHANGING = ("exchange", "ledger", "peering", "mixing")
MAX_CONSTANTS = 300
DIALECT = re.compile(
    r"\b(beside|anew|whoever|any more|let go|of which|what is no news|amid|lest|whence)\b", re.I
)


@dataclass
class Outline:
    """What the rules ask of a file.

    Attributes:
        imports: Dotted names that it imports anywhere; `from a import b` counts as `a.b`.
        relative_imports: Lines with a relative import.
        functions: Line and name of each function.
        classes: Line and name of each class.
        docstrings: Line and text of each docstring.
        strings: Line and text of each string, docstrings too.
        constants: Upper-case name → value, as code, of each constant of the module.
    """

    imports: set[str] = field(default_factory=set)
    relative_imports: list[int] = field(default_factory=list)
    functions: list[tuple[int, str]] = field(default_factory=list)
    classes: list[tuple[int, str]] = field(default_factory=list)
    docstrings: list[tuple[int, str]] = field(default_factory=list)
    strings: list[tuple[int, str]] = field(default_factory=list)
    constants: dict[str, str] = field(default_factory=dict)


@cache
def outline(path: Path) -> Outline:
    """Return the outline of a Python file."""
    found = Outline()
    module = ast.parse(path.read_text())
    for node in module.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            found.constants |= {name: ast.unparse(node.value) for name in names if name.isupper()}
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            found.imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.imports |= {f"{node.module}.{alias.name}" for alias in node.names}
            if node.level:
                found.relative_imports.append(node.lineno)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.functions.append((node.lineno, node.name))
        elif isinstance(node, ast.ClassDef):
            found.classes.append((node.lineno, node.name))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.strings.append((node.lineno, node.value))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            found.docstrings.append((getattr(node, "lineno", 1), text))
    return found


@cache
def python_files(*folders: str) -> list[Path]:
    """List the repository's Python files below `folders`, without migrations and `setup.py`."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [Path(name) for name in listed.splitlines()]
    return [
        ROOT / path
        for path in paths
        if path.parts[0] in folders
        and not {"migrations", "setup.py"} & set(path.parts)
        and (ROOT / path).exists()
    ]


def place(path: Path, line: int) -> str:
    """Name a line of a file."""
    return f"{path.relative_to(ROOT)}:{line}"


def part_of(path: Path, package: Path) -> str:
    """Return the folder (or file) directly below `package` that contains `path`."""
    return path.relative_to(package).parts[0].removesuffix(".py")


def test_no_file_imports_relatively():
    paths = python_files("worker", "platform")
    assert not [path for path in paths if outline(path).relative_imports]


def test_swap_engine_runs_on_a_bare_pytorch_machine():
    """Which package may import which is import-linter's to check: see pyproject.toml."""
    bare = {*sys.stdlib_module_names, "torch", "barnraise"}
    paths = [path for path in python_files("worker") if part_of(path, WORKER) == "swap"]
    found = {path.name: {name.split(".")[0] for name in outline(path).imports} for path in paths}
    assert not {name: imports - bare for name, imports in found.items() if imports - bare}


@pytest.mark.parametrize(("folder", "package"), [("worker", WORKER), ("platform", PLATFORM)])
def test_no_file_is_part_of_an_import_cycle(folder, package):
    """Imports inside functions count: a lazy import hides a cycle, it does not remove one."""
    modules = {}
    for path in python_files(folder):
        dotted = ".".join(path.relative_to(package.parent).with_suffix("").parts)
        modules[dotted.removesuffix(".__init__")] = path
    edges = {
        name: {
            target
            for imported in outline(path).imports
            for target in (imported, imported.rpartition(".")[0])
            if target in modules and target != name and modules[target].name != "__init__.py"
        }
        for name, path in modules.items()
    }
    # Modules that import nothing of the rest are removed until only cycles and their users remain.
    remaining = {name: set(targets) for name, targets in edges.items()}
    while True:
        leaves = {name for name, targets in remaining.items() if not targets & remaining.keys()}
        if not leaves:
            break
        for name in leaves:
            del remaining[name]
    imported = {target for targets in remaining.values() for target in targets}
    cycle = {
        name: targets & remaining.keys() for name, targets in remaining.items() if name in imported
    }
    assert not cycle, cycle


def test_worker_root_has_at_most_seventeen_entries():
    entries = {part_of(path, WORKER) for path in python_files("worker")} - {"__init__", "__main__"}
    assert len(entries) <= 17, sorted(entries)


def test_no_public_function_bears_a_banned_verb():
    """`make_…` is allowed for factories."""
    paths = python_files("worker", "platform", "benchmarks") + [
        path for path in python_files("tests") if TESTS / "helpers" in path.parents
    ]
    banned = [
        f"{place(path, line)} {name}"
        for path in paths
        for line, name in outline(path).functions
        if name.split("_")[0] in BANNED_VERBS or name == "make"
    ]
    assert not banned, "\n".join(banned)


def test_no_class_name_is_defined_twice():
    places = defaultdict(list)
    for path in python_files("worker", "platform"):
        for line, name in outline(path).classes:
            if name not in ("Meta", "Config", "Command", "Migration"):
                places[name].append(place(path, line))
    twice = {name: lines for name, lines in places.items() if len(lines) > 1}
    assert not twice, twice


def constants_of(*packages: str) -> list[tuple[str, str, str]]:
    """List (file, name, value) of the constants of some of the worker's packages."""
    return [
        (str(path.relative_to(WORKER)), name, value)
        for path in python_files("worker")
        if part_of(path, WORKER) in packages
        for name, value in outline(path).constants.items()
    ]


def test_exchanging_packages_have_few_constants():
    """A constant that follows from another is derived, and those of one subject are one class."""
    constants = constants_of(*EXCHANGING)
    assert len(constants) <= MAX_CONSTANTS, len(constants)


def test_no_constant_of_the_exchange_has_two_values():
    values = defaultdict(dict)
    for path, name, value in constants_of(*EXCHANGING, "planning"):
        values[name][path] = value
    twice = {name: of for name, of in values.items() if len(set(of.values())) > 1}
    assert not twice, twice


def test_comments_and_docstrings_are_whole_sentences_in_plain_words():
    """No comment continues another one with "…", and none uses the words of `DIALECT`."""
    findings = []
    for path in python_files("worker", "platform", "benchmarks", "tests"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            comment = re.search(r"(?:^|\s)#\s?(.*)$", line)
            if comment and (
                comment[1].startswith("…") or comment[1].endswith("…") or DIALECT.search(comment[1])
            ):
                findings.append(f"{place(path, number)} {line.strip()}")
        for number, text in outline(path).docstrings:
            if match := DIALECT.search(text):
                findings.append(f"{place(path, number)} docstring: {match[0]}")
    findings = [finding for finding in findings if "test_architecture.py" not in finding]
    assert not findings, "\n".join(findings)


def test_every_ignored_finding_has_its_reason_beside_it():
    """Behind the ignore, or in a comment before it and before other ignores alone."""
    findings = []
    for path in python_files("worker", "platform", "benchmarks", "tests"):
        is_explained = False
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if ignore := IGNORED_FINDING.search(line):
                if not is_explained and not re.search(r"\w{2}", ignore[1]):
                    findings.append(f"{place(path, number)} {line.strip()}")
            else:
                is_explained = line.lstrip().startswith("#")
    assert not findings, "\n".join(findings)


def test_messages_pages_and_documents_use_plain_words():
    """Neither a string of the program nor a page, style sheet or document uses those words."""
    findings = []
    for path in python_files("worker", "platform"):
        for number, text in outline(path).strings:
            if match := DIALECT.search(text):
                findings.append(f"{place(path, number)} {match[0]}")
    texts = [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]
    for folder in ("src", "templates"):
        texts += [path for path in (ROOT / "frontend" / folder).rglob("*") if path.is_file()]
    for path in texts:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if match := DIALECT.search(line):
                findings.append(f"{place(path, number)} {match[0]}")
    assert not findings, "\n".join(findings)


def test_test_names_have_at_most_seventy_characters():
    long = [
        f"{place(path, line)} {name}"
        for path in python_files("tests")
        for line, name in outline(path).functions
        if name.startswith("test_") and len(name) > 70
    ]
    assert not long, "\n".join(long)


def test_nothing_shadows_the_standard_library_or_breaks_test_imports():
    assert not (ROOT / "platform" / "__init__.py").exists()
    assert not list(TESTS.rglob("__init__.py"))


def test_published_migrations_never_change():
    lines = (TESTS / "published_migrations.txt").read_text().splitlines()  # as sha256sum prints
    published = {path: digest for digest, path in map(str.split, lines)}
    assert {str(p.relative_to(PLATFORM)) for p in PLATFORM.glob("*/migrations/0001*.py")} <= {
        *published
    }, "a new app's first migration belongs into the list"
    for path, digest in published.items():
        found = hashlib.sha256((PLATFORM / path).read_bytes()).hexdigest()
        assert found == digest, f"deployed sites have applied {path}: write another migration"


def test_migrations_of_each_app_are_one_chain():
    for app in PLATFORM.iterdir():
        names = sorted(path.stem for path in app.glob("migrations/0*.py"))
        assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1)), app.name
        for before, name in pairwise(names):
            text = (app / "migrations" / f"{name}.py").read_text()
            assert f'("{app.name}", "{before}")' in text, f"{app.name} {name} follows {before}"


def test_top_level_holds_only_the_agreed_entries():
    command = ["git", "ls-files"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    agreed = {
        "platform",
        "worker",
        "frontend",
        "tests",
        "docs",
        "benchmarks",
        ".ci",
        ".github",
        ".pre-commit-config.yaml",
        "examples",
        "manage.py",
        "requirements.txt",
        "README.md",
        "CONTRIBUTING.md",
        "RELEASING.md",
        "SECURITY.md",
        "CHANGELOG.md",
        "LICENSE",
        "Makefile",
        "pyproject.toml",
        ".gitignore",
        ".dockerignore",
    }
    assert {name.split("/")[0] for name in listed.split()} <= agreed
