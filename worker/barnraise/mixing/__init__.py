"""Average replicas with a few neighbours in every step: decentralised Adam."""
