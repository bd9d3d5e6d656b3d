"""Frames between peers: transports, connections and rate limits."""

import os

# Where RUST_BACKTRACE is set, iroh resolves the symbols of a backtrace for each of its errors: this
# costs 50 MB of memory with the first failed connection, which any stranger can cause.
os.environ.setdefault("RUST_LIB_BACKTRACE", "0")
