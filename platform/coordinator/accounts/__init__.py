"""People, their teams and the machines they have enrolled."""
