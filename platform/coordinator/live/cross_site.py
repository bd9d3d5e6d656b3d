"""The mirrors of the list as browsers come to them: a page of one may watch a public run at another when its own fails.

Who comes from another mirror's page is nobody in particular: a cookie of theirs that came along counts for nothing.
"""

from dataclasses import dataclass
from urllib.parse import urlsplit

from channels.security.websocket import OriginValidator
from django.conf import settings
from django.contrib.auth.models import AnonymousUser
from django.http import HttpRequest

from coordinator.lib import site_identity
from coordinator.lib.ttl_cache import TtlCache
from coordinator.replication import mirror_list

SECONDS = 5.0  # that what the list says may be old
OURS = OriginValidator(None, settings.ALLOWED_HOSTS)
USUAL = {"https": 443, "http": 80}  # ports that browsers leave out


@dataclass(frozen=True)
class MirrorSite:
    """`url`: without a slash at its end. `ours`: it is this one."""

    name: str
    url: str
    is_own: bool

    @property
    def origin(self) -> str:
        """As browsers spell it."""
        parts = urlsplit(self.url)
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        port = f":{parts.port}" if parts.port not in (None, USUAL[parts.scheme]) else ""
        return f"{parts.scheme}://{host}{port}"

    @property
    def allowed_sources(self) -> tuple[str, str]:
        """What a policy has to allow for its snapshots and its sockets."""
        return self.origin, f"ws{self.origin.removeprefix('http')}"

    def page_data(self, path: str) -> dict[str, str]:
        """To the script of the page at this path."""
        return {
            "name": self.name,
            "base": "" if self.is_own else self.url,
            "page": f"{self.url}{path}",
        }


_known: TtlCache[None, tuple[MirrorSite, ...]] = TtlCache(SECONDS)


def mirror_sites() -> tuple[MirrorSite, ...]:
    """All mirrors of the list, this one first; none where there is no list, or this site is not of it."""
    return _known.get(None, _listed)


def _listed() -> tuple[MirrorSite, ...]:
    found, own = mirror_list.newest_list(), site_identity.identity().key
    live = [
        MirrorSite(each.name, each.url.rstrip("/"), each.key == own)
        for each in (found.active if found else ())
    ]
    return (
        tuple(sorted(live, key=lambda site: not site.is_own))
        if any(site.is_own for site in live)
        else ()
    )


def requesting_mirror(origin: str | None) -> MirrorSite | None:
    """The other mirror whose page asks, if that is who does."""
    return (
        next((site for site in mirror_sites() if not site.is_own and site.origin == origin), None)
        if origin
        else None
    )


def is_own_origin(origin: str) -> bool:
    """Whether a page of this very site asks."""
    try:
        return OURS.valid_origin(urlsplit(origin) if origin else None)
    except ValueError:  # it is no address at all
        return False


def visitor_and_headers(request: HttpRequest):
    """(Who asks, headers of the answer) for what a page may fetch."""
    headers = {"Cache-Control": "no-store", "Vary": "Origin"}
    if site := requesting_mirror(request.headers.get("Origin")):
        return AnonymousUser(), {**headers, "Access-Control-Allow-Origin": site.origin}
    return request.user, headers
