"""What other mirrors know of machines in runs."""
