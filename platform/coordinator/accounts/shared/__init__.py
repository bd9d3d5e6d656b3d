"""What other mirrors know of people, machines and teams: one file a kind of event."""
