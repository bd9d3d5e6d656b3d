"""What one peer, network or volunteer may use: token buckets, dials, pending handshakes."""
