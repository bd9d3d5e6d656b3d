"""A run's numbers as they come: a snapshot, then numbered deltas over a websocket."""
