"""What travels between peers: updates, verdicts, snapshots and the blobs that they name."""
