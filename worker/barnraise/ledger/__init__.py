"""What counts: the durable set of accepted updates, and the anchor that is their sum."""
