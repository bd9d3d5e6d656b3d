"""Who is connected: addresses, limits, membership, transports and links. It knows no update."""
