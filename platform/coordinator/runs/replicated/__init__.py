"""Event types of the app `runs` that mirrors replicate."""
