"""Send a Content-Security-Policy: pages load our own files alone, and nothing inline.

The admin's Alpine evaluates expressions and the API's documentation has inline styles, so those are
allowed there. A page that watches a run may continue at other mirrors: its view sets the policy
that `page_policy` returns for their origins.
"""

from collections.abc import Iterable

from django.http import HttpRequest, HttpResponse

from coordinator.lib.middleware import GetResponse, sync_middleware

COMMON = (
    "default-src 'self'; img-src 'self' data:; font-src 'self' data:; connect-src 'self'; "
    "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
)
PAGES = f"{COMMON}; style-src 'self'; script-src 'self'"
API = f"{COMMON}; style-src 'self' 'unsafe-inline'; script-src 'self'"
ADMIN = (
    f"{COMMON}; style-src 'self' 'unsafe-inline'; script-src 'self' 'unsafe-inline' 'unsafe-eval'"
)
POLICIES = {"/admin/": ADMIN, "/api/": API}  # by the beginning of the path


def page_policy(origins: Iterable[str] = ()) -> str:
    """Return the policy of a page whose script may also connect to these origins."""
    sources = " ".join(["'self'", *origins])
    return PAGES.replace("connect-src 'self'", f"connect-src {sources}")


@sync_middleware
def set_policy(request: HttpRequest, get_response: GetResponse) -> HttpResponse:
    """Set the policy that belongs to the request's path, unless the view has set one."""
    response = get_response(request)
    matching = (policy for start, policy in POLICIES.items() if request.path.startswith(start))
    response.headers.setdefault("Content-Security-Policy", next(matching, PAGES))
    return response
