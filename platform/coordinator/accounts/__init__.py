"""People, and the machines they have enrolled."""
