"""How long a round is, what it publishes, and how its update is weighted. Pure."""
