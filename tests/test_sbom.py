"""The SBOM names every package with its version and licence."""

import json
import subprocess
import sys

from helpers import sbom
from helpers.paths import ROOT


def test_sbom_lists_every_pinned_package_once(tmp_path, monkeypatch):
    monkeypatch.setattr(sbom, "BUILD", tmp_path)
    monkeypatch.setattr(sys, "argv", ["sbom.py"])
    assert sbom.main() == 0
    document = json.loads((tmp_path / "sbom.json").read_text())
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.5")
    urls = [component["purl"] for component in document["components"]]
    pins = sbom.PIN.findall((ROOT / "requirements.txt").read_text())
    assert len(urls) == len(set(urls)) and len(pins) > 100
    assert sum(url.startswith("pkg:pypi/") for url in urls) == len(pins)
    assert any(url.startswith("pkg:npm/uplot@") for url in urls)
    licences = {each["name"]: each["licenses"][0]["license"] for each in document["components"]}
    assert "LGPL" in licences["psycopg"]["name"] and licences["rich"]["name"] == "MIT License"


def test_licences_that_ask_for_something_come_first():
    free = sbom.Component("pypi", "a", "1", "MIT License")
    asking = sbom.Component("pypi", "z", "1", "LGPLv3")
    assert sbom.format_table([free, asking]).splitlines()[2] == "| z | 1 | LGPLv3 |"


def test_make_has_the_target():
    planned = ["make", "--dry-run", "sbom", "check-pythons", "drill-upgrade"]
    subprocess.run(planned, cwd=ROOT, check=True, capture_output=True)
