"""Agree with the others: integer updates, the ledger of them, and the peers they travel between."""
