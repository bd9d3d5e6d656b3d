"""Barnraise: train a GPT together, each on their own computer."""

from pathlib import Path

# `setup.py` writes the version of the newest tag; a clone without tags has the last release's.
_WRITTEN = Path(__file__).with_name("version.txt")
__version__ = _WRITTEN.read_text() if _WRITTEN.exists() else "0.1.0"
