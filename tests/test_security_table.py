"""Every attack that docs/security.md lists has the tests that it names."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FINDINGS = {
    f"{severity}{number}"
    for severity, count in {"C": 4, "H": 7, "M": 7, "L": 8}.items()
    for number in range(1, count + 1)
}


def test_every_finding_of_the_review_names_tests_that_exist():
    text = (ROOT / "docs" / "security.md").read_text()
    rows = re.findall(r"^\| ([CHML]\d) \|(.*)$", text, re.MULTILINE)
    assert {finding for finding, _ in rows} == FINDINGS
    assert all("`test_" in row for _, row in rows)
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)\(", path.read_text())
    }
    named = {name for name in re.findall(r"`(test_\w+)`", text) if not name.endswith("_py")}
    assert named <= defined, sorted(named - defined)
