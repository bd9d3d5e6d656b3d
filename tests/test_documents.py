"""Links, anchors, files, tests, tasks and commands that the documents name exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE_BLOCK = re.compile(r"^```.*?^```", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED_FILE = re.compile(r"(?<![\w/.])(?:tests|benchmarks|platform|worker)/[\w./-]+\.py\b")
NAMED_TEST_FILE = re.compile(r"`(test_\w+)(?:\.py)?`")
TASK_ROW = re.compile(r"^\| `(\w+\.\w+)` \|", re.M)
BINARY_UNIT = re.compile(r"(?<![A-Za-z\[\]])[KMGT]iB\b")
MAKE_TARGET = re.compile(r"`make ([a-z][\w-]*)")


def find_anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub forms them."""
    headings = re.findall(r"^#+ (.+)$", CODE_BLOCK.sub("", document.read_text()), re.M)
    texts = [LINK.sub("]", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-") for text in texts}


def test_every_link_leads_to_a_file_and_a_heading_that_exist():
    broken = []
    for document in DOCUMENTS:
        for link in LINK.findall(document.read_text()):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = document.parent / path if path else document
            if not target.exists():
                broken.append(f"{document.name}: {link} does not exist")
            elif anchor and anchor not in find_anchors(target):
                broken.append(f"{document.name}: {link} has no such heading")
    assert not broken, "\n".join(broken)


def test_every_file_that_a_document_names_by_its_path_exists():
    missing = [
        f"{document.name}: {name}"
        for document in DOCUMENTS
        for name in NAMED_FILE.findall(document.read_text())
        if not (ROOT / name).exists()
    ]
    assert not missing, "\n".join(missing)


def test_every_test_that_a_document_names_exists():
    files = list((ROOT / "tests").rglob("test_*.py"))
    names = {path.stem for path in files}
    names |= {name for path in files for name in re.findall(r"def (test_\w+)", path.read_text())}
    missing = [
        f"{document.name}: {name}"
        for document in DOCUMENTS
        for name in NAMED_TEST_FILE.findall(document.read_text())
        if name not in names
    ]
    assert not missing, "\n".join(missing)


def test_every_task_in_the_table_of_the_site_exists():
    sources = [path.read_text() for path in (ROOT / "platform").rglob("tasks.py")]
    tasks = {name for text in sources for name in re.findall(r'name="(\w+\.\w+)"', text)}
    named = set(TASK_ROW.findall((ROOT / "docs" / "site.md").read_text()))
    assert len(named) > 5
    assert named <= tasks, sorted(named - tasks)


def test_every_make_target_that_a_document_names_exists():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    missing = [
        f"{document.name}: make {name}"
        for document in DOCUMENTS
        for name in MAKE_TARGET.findall(document.read_text())
        if name not in targets
    ]
    assert not missing, "\n".join(missing)


def quote_strings(path: Path) -> Iterator[str]:
    """Yield the strings of a Python file, without its docstrings and comments."""
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in docstrings:
            yield node.value


def test_shares_have_one_form_in_pages_and_terminals():
    """`formats.format_share` writes them, and no 100 % before the end."""
    files = [*(ROOT / "platform").rglob("*.py"), *(ROOT / "worker" / "barnraise").rglob("*.py")]
    found = [str(path) for path in files if re.search(r":\.\d%\}", path.read_text())]
    assert not found, found


def test_sizes_are_decimal_wherever_people_read_them():
    """GB on pages, in terminals, letters and documents; code comments may have GiB."""
    texts = {path: [path.read_text()] for path in DOCUMENTS}
    for folder, pattern in (("frontend/templates", "*.*"), ("tests/contract/golden", "*.json")):
        texts |= {path: [path.read_text()] for path in (ROOT / folder).rglob(pattern)}
    for folder in ("platform", "worker/barnraise"):
        texts |= {path: [*quote_strings(path)] for path in (ROOT / folder).rglob("*.py")}
    found = [
        f"{path.relative_to(ROOT)}: {text[:100]}"
        for path, strings in texts.items()
        for text in strings
        if BINARY_UNIT.search(text)
    ]
    assert not found, "\n".join(found)
