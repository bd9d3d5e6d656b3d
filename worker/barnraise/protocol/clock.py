"""By how much two clocks may differ, and for whom."""

# A request is signed with a time. When a mirror corrects the time by more, the request is worth
# signing again, and the other mirrors' clocks are worth a look.
REQUEST_CLOCK_SECONDS = 1.0
# A machine's clock that differs from the site's by more is reported to its owner, in the log and by
# `barnraise doctor`: peers hold back updates from the future.
OWNER_CLOCK_SECONDS = 5.0
