"""Credit for trained tokens, and leaderboards."""
