"""Commands that start a demo."""
