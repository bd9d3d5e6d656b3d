"""Barnraise: train a GPT together, each on their own computer."""

__version__ = "0.1.0"
