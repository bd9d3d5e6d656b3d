#!/usr/bin/env python
"""Run Django's management commands.

Both source roots are put on the path, so that a coordinator runs without being installed.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT / "platform"), str(ROOT / "worker")]
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "coordinator.settings")

if __name__ == "__main__":
    from django.core.management import execute_from_command_line

    execute_from_command_line(sys.argv)
