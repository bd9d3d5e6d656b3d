"""Commands that change the mirror list and pull events."""
