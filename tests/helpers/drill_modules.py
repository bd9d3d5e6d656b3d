"""Import modules of the drills, which are scripts and no package."""

import importlib
import sys
from types import ModuleType

from helpers.paths import ROOT

FOLDERS = ("drills", "mirrors", "shared", "strangers", "swap")


def import_drill_module(name: str) -> ModuleType:
    """Return a module of the drills' folders in `benchmarks`."""
    for folder in FOLDERS:
        path = str(ROOT / "benchmarks" / folder)
        if path not in sys.path:
            sys.path.append(path)
    return importlib.import_module(name)
