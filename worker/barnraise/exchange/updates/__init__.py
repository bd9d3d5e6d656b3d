"""Publish this machine's updates, and receive those of others."""
