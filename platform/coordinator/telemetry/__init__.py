"""Reports in, rollups out."""
