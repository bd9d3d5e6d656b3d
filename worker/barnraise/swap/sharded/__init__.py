"""Train a model whose state several processes share, with torch's FSDP2 and tensor parallelism."""
