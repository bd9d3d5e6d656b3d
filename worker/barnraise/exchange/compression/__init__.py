"""Compression of updates: quantisation schemes and the codec."""
