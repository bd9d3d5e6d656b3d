"""The `barnraise` command, one file for each group of commands."""

import gc

gc.set_threshold(5_000)  # with Python's own 700 a worker's start takes an eighth longer
