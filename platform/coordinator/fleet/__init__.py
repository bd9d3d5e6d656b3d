"""Which machines are in which run, alive or gone."""
