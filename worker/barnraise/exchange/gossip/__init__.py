"""Pure state machines of the peer-to-peer network: gossip, membership, requests, verdicts."""
