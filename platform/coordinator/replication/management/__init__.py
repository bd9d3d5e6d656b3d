"""Management commands of the replication."""
