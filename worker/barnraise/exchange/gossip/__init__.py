"""Who needs which update, and who is asked for it. Pure."""
