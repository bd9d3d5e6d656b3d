"""Send and fetch the anchor, for machines that join late or lost their state."""
