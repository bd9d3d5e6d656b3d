"""One connection: handshake, dials, hole punching, dial-back and the bandwidth probe."""
