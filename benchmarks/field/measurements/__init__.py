"""What `make bench-exchange` measures, a module for each part."""
