"""Frames between peers: transports, connections and rate limits."""
