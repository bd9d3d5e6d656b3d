"""Record changes as signed events in logs that mirrors replicate."""
