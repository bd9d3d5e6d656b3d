"""Train one model on one machine.

Standard library and torch only; independent of peers, files and codecs.
"""
