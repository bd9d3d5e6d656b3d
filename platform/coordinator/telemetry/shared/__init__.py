"""What other mirrors know of what reports say: told every few minutes, never with a report."""
