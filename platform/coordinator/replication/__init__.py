"""Replicate the event log between mirrors."""
