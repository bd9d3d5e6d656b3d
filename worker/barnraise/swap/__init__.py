"""Train one model on one machine. Standard library and torch alone; knows nothing of peers, files or codecs."""
