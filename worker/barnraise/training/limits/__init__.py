"""When this machine may train: its owner's rules, what the machine is like, and the decision."""
