"""What workers and scripts call: JSON under /api/v1, documented at /api/v1/docs."""
