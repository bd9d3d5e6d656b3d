"""A run's text: its sources, its tokenizer, token shards and batches."""
