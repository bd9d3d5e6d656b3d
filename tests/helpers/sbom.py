"""Write what this version is made of: an SBOM (CycloneDX 1.5), and the licence of each package.

Usage: `make sbom`. It reads the installed packages that requirements.txt pins and the lock file of
the frontend; nothing is fetched. `build/sbom.json` has the components, `build/licences.md` a table.
"""

import argparse
import json
import re
import sys
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import quote

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
PIN = re.compile(r"^([\w.-]+)(?:\[[\w,]+\])?==(\S+)", re.M)
UNKNOWN = "none named"
PREFIX = "License :: OSI Approved :: "


@dataclass(frozen=True)
class Component:
    """One package of a version."""

    ecosystem: str  # as package URLs call it
    name: str
    version: str
    licence: str  # as the package names it

    @property
    def package_url(self) -> str:
        """Its address in the form of purl-spec."""
        return f"pkg:{self.ecosystem}/{quote(self.name)}@{quote(self.version)}"


def main() -> int:
    """Write both files, and print where."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args()
    sys.path.insert(0, str(ROOT / "worker"))
    from barnraise import __version__

    components = [*list_python_packages(), *list_npm_packages()]
    BUILD.mkdir(exist_ok=True)
    sbom = BUILD / "sbom.json"
    sbom.write_text(json.dumps(format_sbom(__version__, components), indent=1))
    table = BUILD / "licences.md"
    table.write_text(format_table(components))
    unknown = [component.name for component in components if component.licence == UNKNOWN]
    print(f"{sbom} and {table}: {len(components)} packages", end="")
    print(f"; without a named licence: {', '.join(unknown)}" if unknown else "")
    return 0


def list_python_packages() -> list[Component]:
    """Return the pinned packages; those of other systems are not installed and have no licence."""
    components = []
    for name, version in PIN.findall((ROOT / "requirements.txt").read_text()):
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            components.append(Component("pypi", name.lower(), version, UNKNOWN))
            continue
        licence = read_licence(installed)
        components.append(Component("pypi", name.lower(), installed.version, licence))
    return components


def read_licence(installed: Distribution) -> str:
    """Return a package's licence: its expression, else its classifiers, else a short text."""
    metadata = installed.metadata
    if expression := metadata.get("License-Expression"):
        return expression
    classifiers = metadata.get_all("Classifier") or []
    named = [each.removeprefix(PREFIX) for each in classifiers if each.startswith(PREFIX)]
    if named:
        return ", ".join(named)
    text = (metadata.get("License") or "").strip()
    return text if text and "\n" not in text and len(text) < 80 else UNKNOWN


def list_npm_packages() -> list[Component]:
    """Return the frontend's packages that its pages contain, not those that only build it."""
    lock = json.loads((ROOT / "frontend" / "package-lock.json").read_text())
    return [
        Component("npm", path.rpartition("node_modules/")[2], package["version"], licence)
        for path, package in lock["packages"].items()
        if path and not package.get("dev")
        for licence in [package.get("license", UNKNOWN)]
    ]


def format_sbom(version: str, components: list[Component]) -> dict[str, Any]:
    """Return the document. Pure."""
    root = {"type": "application", "name": "barnraise", "version": version}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {**root, "licenses": [{"license": {"id": "Apache-2.0"}}]}},
        "components": [
            {
                "type": "library",
                "name": component.name,
                "version": component.version,
                "purl": component.package_url,
                "bom-ref": component.package_url,
                "licenses": [{"license": {"name": component.licence}}],
            }
            for component in components
        ],
    }


def format_table(components: list[Component]) -> str:
    """Return a table of all packages, those whose licence asks for something first. Pure."""
    asking = re.compile(r"GPL|MPL|Mozilla|none named", re.I)
    ordered = sorted(
        components, key=lambda each: (not asking.search(each.licence), each.licence, each.name)
    )
    rows = [f"| {each.name} | {each.version} | {each.licence} |\n" for each in ordered]
    return "| package | version | licence |\n|---|---|---|\n" + "".join(rows)


if __name__ == "__main__":
    sys.exit(main())
