"""How long the rules may be by which a machine's owner says when it trains."""

MAX_PROGRAMS = 8  # that a rule names
MAX_PROGRAM_NAME = 32  # characters
MAX_HOURS = 120  # characters
