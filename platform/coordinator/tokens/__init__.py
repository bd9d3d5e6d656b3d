"""Personal tokens, for scripts."""
