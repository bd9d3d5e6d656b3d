"""Event types of the fleet that mirrors replicate."""
