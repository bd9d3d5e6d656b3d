"""What a browser may load on our pages: only our own. The admin's Alpine evaluates expressions, so it may do that."""

from django.http import HttpRequest, HttpResponse

COMMON = (
    "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; font-src 'self' data:; "
    "connect-src 'self'; object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
)
PAGES = f"{COMMON}; script-src 'self'"
ADMIN = f"{COMMON}; script-src 'self' 'unsafe-inline' 'unsafe-eval'"


class ContentSecurityPolicy:
    sync_capable = True
    async_capable = False

    def __init__(self, get_response):
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        response = self.get_response(request)
        response.headers.setdefault("Content-Security-Policy", ADMIN if request.path.startswith("/admin/") else PAGES)
        return response
