"""Messages between workers and coordinators, and the signatures on them."""
