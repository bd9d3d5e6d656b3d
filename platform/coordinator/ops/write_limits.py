"""Bound what one person may change in a time, on pages and with API tokens.

Every change is a row, an entry of the audit log and often an event that all mirrors keep for ever,
and an estimate costs a tenth of a second. Nobody clicks that often; a program does.
"""

import redis.exceptions
from django.http import HttpRequest, HttpResponse

from coordinator.lib.middleware import GetResponse, sync_middleware
from coordinator.lib.period_counters import count_in_period
from coordinator.ops import error_pages
from coordinator.ops.read_only import SAFE_METHODS

WRITE_LIMITS = ((60, 300), (86_400, 10_000))  # (seconds, writes of one person within them)
REFUSAL = "You have changed very much in a short time. Wait a while, then try again."


def count_write(person: object) -> bool:
    """Count a request of a person that may change something; return whether it is within limits.

    While Valkey is away nothing is counted and nobody refused: what is left of the site works.
    """
    try:
        counts = [
            (count_in_period(f"writes:{person}:{seconds}", seconds), most)
            for seconds, most in WRITE_LIMITS
        ]
    except redis.exceptions.RedisError:
        return True
    return all(count <= most for count, most in counts)


@sync_middleware
def limit_writes(request: HttpRequest, get_response: GetResponse) -> HttpResponse:
    """Answer 429 to a signed-in person who changes too much.

    The API has no sessions: it counts by its tokens.
    """
    is_write = request.method not in SAFE_METHODS
    has_session = not request.path.startswith(error_pages.API_PATH)
    is_known = is_write and has_session and request.user.is_authenticated
    if is_known and not count_write(request.user.pk):
        return error_pages.error_response(request, 429, REFUSAL)
    return get_response(request)
