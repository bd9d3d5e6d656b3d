"""Provide what every app needs. Imports nothing of ours."""
