"""What other mirrors know of runs."""
