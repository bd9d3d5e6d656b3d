"""What the audit of dependencies reports when registries answer, and when they do not."""

import json

import pytest
from helpers import dependency_audit, run_suites

FOUND = {
    "dependencies": [
        {"name": "good", "version": "1.0", "vulns": []},
        {"name": "bad", "version": "2.0", "vulns": [{"id": "CVE-2026-0001"}]},
    ]
}


@pytest.fixture
def registry(monkeypatch, tmp_path):
    """Yield a list of what the audit's commands print, in order; without one they fail."""
    answers = []

    def run(*command: str, folder=None) -> tuple[bool, str]:
        return (True, answers.pop(0)) if answers else (False, "")

    (tmp_path / "installed").touch()
    monkeypatch.setattr(dependency_audit, "TOOL", tmp_path)
    monkeypatch.setattr(dependency_audit, "run", run)
    return answers


def test_audit_without_an_answer_says_so_and_passes(registry, capsys):
    assert dependency_audit.main() == 0
    assert "does not answer" in capsys.readouterr().out


def test_audit_lists_what_is_vulnerable(registry, capsys):
    registry += [json.dumps(FOUND), json.dumps({"vulnerabilities": {}})]
    assert dependency_audit.main() == 1
    assert "bad 2.0: CVE-2026-0001" in capsys.readouterr().out


def test_audit_reads_what_the_workers_dependencies_bring():
    """The worker names a range of each, and nothing of what they bring themselves."""
    names = {package.partition("==")[0].casefold() for package in dependency_audit.list_resolved()}
    assert {"torch", "httpx", "httpcore", "h11", "certifi", "jinja2", "huggingface_hub"} <= names
    assert not any("+" in package for package in dependency_audit.list_resolved())


def test_vulnerability_is_a_warning_of_the_tests_and_no_failure():
    assert run_suites.describe_outcome("audit", 1).startswith("WARNING")
    assert run_suites.describe_outcome("lint", 1) == "FAILED"
