"""Spread the verdicts that retract updates, and apply them."""
