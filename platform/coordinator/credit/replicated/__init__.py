"""Event types of the app `credit` that mirrors replicate."""
