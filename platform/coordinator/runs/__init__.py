"""What is being trained: runs, their lifecycle, and what the mirror signs for them."""
