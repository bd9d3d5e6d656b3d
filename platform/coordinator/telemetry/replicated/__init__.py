"""Event types of the app `telemetry` that mirrors replicate."""
