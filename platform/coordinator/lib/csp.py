"""What a browser may load on our pages: our own files, and nothing inline. The admin's Alpine evaluates expressions and
the API's documentation styles inline, so they may. A page that watches a run may go on at other mirrors: the origins
that its view says it `reaches`."""

from django.http import HttpRequest, HttpResponse

COMMON = (
    "default-src 'self'; img-src 'self' data:; font-src 'self' data:; "
    "connect-src 'self'; object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
)
PAGES = f"{COMMON}; style-src 'self'; script-src 'self'"
API = f"{COMMON}; style-src 'self' 'unsafe-inline'; script-src 'self'"
ADMIN = (
    f"{COMMON}; style-src 'self' 'unsafe-inline'; script-src 'self' 'unsafe-inline' 'unsafe-eval'"
)
POLICIES = {"/admin/": ADMIN, "/api/": API}


class ContentSecurityPolicy:
    sync_capable = True
    async_capable = False

    def __init__(self, get_response):
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        response = self.get_response(request)
        policy = next(
            (policy for start, policy in POLICIES.items() if request.path.startswith(start)), PAGES
        )
        if others := getattr(request, "reaches", ()):
            policy = policy.replace("connect-src 'self'", f"connect-src 'self' {' '.join(others)}")
        response.headers.setdefault("Content-Security-Policy", policy)
        return response
