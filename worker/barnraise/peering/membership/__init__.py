"""Which peers this machine knows, links to and dials, and with whose help. Pure."""
