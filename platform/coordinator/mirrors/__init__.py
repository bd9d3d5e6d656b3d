"""The event log: every change that another mirror must know, signed and numbered, and the state that follows."""
