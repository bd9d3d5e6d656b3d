"""Import modules of the drills, which are scripts and no package."""

import importlib
import sys
from types import ModuleType

from helpers.paths import ROOT


def import_drill_module(name: str) -> ModuleType:
    """Return a module of `benchmarks/exchange`."""
    folder = str(ROOT / "benchmarks" / "exchange")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)
