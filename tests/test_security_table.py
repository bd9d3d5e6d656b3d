"""docs/security.md names tests that exist, and quotes what strangers may use as it is."""

import re
from pathlib import Path

from barnraise.peering.limits.service_limits import SERVICE_LIMITS, WAITING_LIMITS

ROOT = Path(__file__).parents[1]
TABLE_HEAD = "| service | of each | per second | at once | waiting |\n|---|---|---|---|---|\n"
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


def render_amount(amount: float, unit: str) -> str:
    return f"{amount / 1e6:,.0f} MB" if unit.startswith("bytes") else f"{amount:,.0f}"


def render_service_table() -> list[str]:
    """Write the rows that the document must have, one for each service and group."""
    rows = []
    for service, rates in SERVICE_LIMITS.items():
        for group, (per_second, burst) in rates.items():
            often = render_amount(per_second, service.value)
            if per_second < 1:
                often = f"1 in {1 / per_second:.0f} s"
            waiting = WAITING_LIMITS.get(service, {}).get(group, "")
            amounts = f"{often} | {render_amount(burst, service.value)} | {waiting}"
            rows.append(f"| {service.value} | {group} | {amounts} |")
        for group, waiting in WAITING_LIMITS.get(service, {}).items():
            if group not in rates:
                rows.append(f"| {service.value} | {group} | | | {waiting} |")
    return rows


def test_document_quotes_the_table_of_what_strangers_may_use():
    text = (ROOT / "docs" / "security.md").read_text()
    _, table = text.split(TABLE_HEAD)
    quoted = table.split("\n\n")[0].splitlines()
    assert [re.sub(r" +", " ", row) for row in quoted] == [
        re.sub(r" +", " ", row) for row in render_service_table()
    ]
