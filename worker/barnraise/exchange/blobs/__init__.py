"""Fetch, check and delete the payload files that updates and snapshots name."""
