"""What other mirrors know of what people want to be told: one file a kind of event."""
