"""The JSON API under `/api/v1` for workers, scripts and other mirrors."""
