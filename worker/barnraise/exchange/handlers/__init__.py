"""One handler for each thing that peers exchange: updates, verdicts, snapshots, blobs."""
