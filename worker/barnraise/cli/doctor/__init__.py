"""Check what a machine needs to take part in a run, and name the remedy of each problem."""
