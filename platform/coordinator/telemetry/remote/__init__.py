"""Figures of machines that report to other mirrors."""
