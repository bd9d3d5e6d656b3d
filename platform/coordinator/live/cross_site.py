"""Let pages of other mirrors watch a public run here when their own site fails.

A visitor from another mirror's page is anonymous: cookies that the browser sends along are ignored.
"""

from dataclasses import dataclass
from urllib.parse import urlparse, urlsplit

from channels.security.websocket import OriginValidator
from django.conf import settings
from django.contrib.auth.models import AbstractBaseUser, AnonymousUser
from django.http import HttpRequest

from coordinator.lib import site_identity
from coordinator.lib.ttl_cache import TtlCache
from coordinator.replication import mirror_list

CACHE_SECONDS = 5.0  # for the sites of the mirror list
OWN_ORIGINS = OriginValidator(None, settings.ALLOWED_HOSTS)  # pyright: ignore[reportArgumentType]  # used for its check alone
DEFAULT_PORTS = {"https": 443, "http": 80}  # browsers leave these out


@dataclass(frozen=True)
class MirrorSite:
    """One site of the mirror list, as browsers reach it."""

    name: str  # in the list
    url: str  # without a slash at the end
    is_own: bool  # it is this site

    @property
    def origin(self) -> str:
        """Return the site's origin as browsers spell it."""
        parts = urlsplit(self.url)
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        is_default_port = parts.port in (None, DEFAULT_PORTS[parts.scheme])
        port = "" if is_default_port else f":{parts.port}"
        return f"{parts.scheme}://{host}{port}"

    @property
    def allowed_sources(self) -> tuple[str, str]:
        """Return the sources that a content security policy must allow: snapshots and sockets."""
        return self.origin, f"ws{self.origin.removeprefix('http')}"

    def page_data(self, path: str) -> dict[str, str]:
        """Describe this site to the script of the page at `path`."""
        return {
            "name": self.name,
            "base": "" if self.is_own else self.url,
            "page": f"{self.url}{path}",
        }


_sites: TtlCache[None, tuple[MirrorSite, ...]] = TtlCache(CACHE_SECONDS)


def mirror_sites() -> tuple[MirrorSite, ...]:
    """List all mirrors, this site first.

    Empty where there is no mirror list, or where this site is not in it.
    """
    return _sites.get(None, _load_mirror_sites)


def _load_mirror_sites() -> tuple[MirrorSite, ...]:
    newest = mirror_list.newest_list()
    own_key = site_identity.identity().key
    sites = [
        MirrorSite(listed.name, listed.url.rstrip("/"), listed.key == own_key)
        for listed in (newest.active if newest else ())
    ]
    if not any(site.is_own for site in sites):
        return ()
    return tuple(sorted(sites, key=lambda site: not site.is_own))


def requesting_mirror(origin: str | None) -> MirrorSite | None:
    """Return the other mirror with this origin, or None."""
    if not origin:
        return None
    return next(
        (site for site in mirror_sites() if not site.is_own and site.origin == origin), None
    )


def is_own_origin(origin: str) -> bool:
    """Return whether the origin is this site."""
    try:
        return OWN_ORIGINS.valid_origin(urlparse(origin) if origin else None)
    except ValueError:  # not an address
        return False


def visitor_and_headers(
    request: HttpRequest,
) -> tuple[AbstractBaseUser | AnonymousUser, dict[str, str]]:
    """Return whom a request acts for, and the headers of its response.

    A request from another mirror's page is anonymous, and the response allows its origin.
    """
    headers = {"Cache-Control": "no-store", "Vary": "Origin"}
    if site := requesting_mirror(request.headers.get("Origin")):
        return AnonymousUser(), {**headers, "Access-Control-Allow-Origin": site.origin}
    return request.user, headers
