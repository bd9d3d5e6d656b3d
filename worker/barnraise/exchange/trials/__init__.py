"""Trials: newcomers' rounds that peers compare before any update of these counts."""
