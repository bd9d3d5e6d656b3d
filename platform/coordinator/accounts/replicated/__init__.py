"""Event types of the app `accounts` that mirrors replicate."""
