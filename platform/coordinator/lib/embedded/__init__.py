"""Postgres and Valkey from Python wheels, for a site that names no servers of its own."""
