"""Serve operators: health, metrics, error pages, read-only mode."""
