"""When a row changed last, in an order that other mirrors can follow: what they have not heard of comes after what they
have.

A moment is milliseconds by this site's clock and never less than one before, whatever the clock does: it goes on rising
where numbers of rows would begin anew, after a restore from a backup.
"""

import time

from django.db.models import Max

from coordinator.fleet.models import Membership


def next_change_stamp() -> int:
    """The next one. Within the transaction of the one process that drains (`rollup.drain`), so that they commit in
    order: each of its transactions changes a membership."""
    last = (
        Membership.everywhere.filter(changed__isnull=False).aggregate(last=Max("changed"))["last"]
        or 0
    )
    return max(int(time.time() * 1000), last + 1)
