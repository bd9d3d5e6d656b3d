"""Live updates of a run: a snapshot over HTTP, then numbered deltas over a websocket."""
