"""One adapter for each system that `make bench-exchange` measures.

Each module has `run_worker(job)`, which makes one worker's part of a measurement.
"""
