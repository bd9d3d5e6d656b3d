"""How much this machine's update counts, and what the others' are worth. Pure."""
