"""Who is asking: a machine, by a signature made for this one request; or a person's script, by a token."""

import secrets
import time
from collections.abc import Callable

from django.http import HttpRequest
from django.utils import timezone

from barnraise.errors import MessageError
from barnraise.protocol.signing import check_request
from coordinator.accounts.models import Machine
from coordinator.fleet.report_queries import machine_for_key
from coordinator.lib import site_identity
from coordinator.lib.valkey import valkey_client
from coordinator.replication import mirror_list
from coordinator.tokens.models import Token

SCHEME, BEARER = "Barnraise ", "Bearer "
SPENT_SECONDS = (
    180  # a request's id is remembered longer than its signature lives, in either direction
)
SEEN_EVERY = 60.0  # seconds between two writes of a machine's last_seen
MAX_FAILURES, FAILURES_SECONDS = 120, 600  # wrong tokens and unknown keys from one address
MAX_TOKEN_REQUESTS, TOKEN_REQUESTS_SECONDS = 300, 60  # of one token
MAX_MACHINE_REQUESTS, MACHINE_REQUESTS_SECONDS = 600, 60
"""Of one machine: twice what the quickest run asks for, and no queue full of one's own."""


class ApiError(Exception):
    """An answer with a status and a sentence; `fields` maps dotted names to sentences."""

    def __init__(self, status: int, sentence: str, fields: dict[str, str] | None = None):
        self.status, self.sentence, self.fields = status, sentence, fields or {}
        super().__init__(sentence)


def authenticate_machine(request: HttpRequest) -> Machine:
    """The machine that signed this request, for this mirror, method, path and body, once, and not too often. Raises
    Refusal."""
    key, jti = _signer(request, "your machine's key")
    machine = machine_for_key(key)
    if machine is None:
        enforce_rate_limit(request, "refused", MAX_FAILURES, FAILURES_SECONDS)
        raise ApiError(
            401, f"the key {key[:8]}… is not enrolled here: run `barnraise login` on this machine"
        )
    if machine.revoked or not machine.owner.is_active:
        raise ApiError(
            403,
            f"the machine {machine.name} was revoked here; its owner can enrol it with a new key",
        )
    _spend(key, jti, machine)
    now = timezone.now()
    if machine.last_seen is None or (now - machine.last_seen).total_seconds() > SEEN_EVERY:
        Machine.objects.filter(pk=machine.pk).update(last_seen=now)
    return machine


def authenticate_mirror(request: HttpRequest) -> str:
    """The key of the mirror of the list that signed this request, once. Raises Refusal."""
    key, jti = _signer(request, "your mirror's key")
    found = mirror_list.newest_list()
    if found is None:
        raise ApiError(403, "this site is no mirror of others: it has no mirror list")
    listed = found.find(key)
    if listed is None:
        enforce_rate_limit(request, "refused", MAX_FAILURES, FAILURES_SECONDS)
        raise ApiError(401, f"the key {key[:8]}… is no mirror of list {found.version}")
    if listed.expelled:
        raise ApiError(403, f"the mirror {listed.name} was expelled by list {found.version}")
    _spend(key, jti)
    return key


def _signer(request: HttpRequest, with_what: str) -> tuple[str, str]:
    """(key, jti) of a request that is signed for this mirror, method, path and body. Raises Refusal."""
    header = request.headers.get("Authorization", "")
    if not header.startswith(SCHEME):
        raise ApiError(401, f"sign this request with {with_what}: Authorization: Barnraise <token>")
    token = header.removeprefix(SCHEME)
    method, path = request.method or "", request.get_full_path()
    try:
        return check_request(
            token, site_identity.identity().key, method, path, request.body, time.time()
        )
    except MessageError as error:
        raise ApiError(401, str(error)) from None


def _spend(key: str, jti: str, machine: Machine | None = None) -> None:
    """A request is made once, and by one machine not too often: in one trip to Valkey. A replay is nobody's doing, and
    counts against nobody."""
    ours = secrets.token_hex(
        8
    )  # tells a retry of our own, over a connection that broke, from a replay
    counter = _counter(f"machine:{machine.pk}", MACHINE_REQUESTS_SECONDS) if machine else ""
    with valkey_client().pipeline(transaction=False) as pipe:
        pipe.set(f"jti:{key}:{jti}", ours, nx=True, get=True, ex=SPENT_SECONDS)
        if counter:
            pipe.incr(counter).expire(counter, MACHINE_REQUESTS_SECONDS)
        before, *count = pipe.execute()
    if before not in (None, ours):
        if counter:
            valkey_client().decr(counter)
        raise ApiError(401, "this request was made before; sign each one afresh")
    if count and count[0] > MAX_MACHINE_REQUESTS:
        raise _too_many("this machine", MACHINE_REQUESTS_SECONDS)


def token_auth(scope: str) -> Callable[[HttpRequest], Token]:
    """Authentication by a personal token that may do `scope`; "": by any. Raises Refusal."""

    def by_token(request: HttpRequest) -> Token:
        header = request.headers.get("Authorization", "")
        if not header.startswith(BEARER):
            raise ApiError(
                401, "show a personal token: Authorization: Bearer brn_…; make one under API tokens"
            )
        token = Token.find_by_text(header.removeprefix(BEARER).strip()[:200])
        if token is None or not token.is_valid:
            enforce_rate_limit(request, "refused", MAX_FAILURES, FAILURES_SECONDS)
            raise ApiError(
                401, "this token is not one of ours, or it was revoked or ran out: make another"
            )
        enforce_rate_limit(request, "token", MAX_TOKEN_REQUESTS, TOKEN_REQUESTS_SECONDS, token)
        if scope and scope not in token.scopes:
            raise ApiError(
                403,
                f"this token may not do that: it has the scopes {', '.join(token.scopes)}, not {scope}",
            )
        token.record_use()
        return token

    return by_token


def machine_or_token_auth(scope: str) -> Callable[[HttpRequest], Machine | Token]:
    by_token = token_auth(scope)

    def either(request: HttpRequest) -> Machine | Token:
        bearer = request.headers.get("Authorization", "").startswith(BEARER)
        return by_token(request) if bearer else authenticate_machine(request)

    return either


def enforce_rate_limit(
    request: HttpRequest, what: str, most: int, seconds: int, token: Token | None = None
) -> None:
    """No more than `most` of these by one token, or else from one address, in so many seconds. Raises Refusal."""
    counter = _counter(
        f"{what}:{token.pk if token else request.META.get('REMOTE_ADDR', '')}", seconds
    )
    with valkey_client().pipeline() as pipe:
        count, _ = pipe.incr(counter).expire(counter, seconds).execute()
    if count > most:
        raise _too_many("this token" if token else "your address", seconds)


def _counter(what: str, seconds: int) -> str:
    """Where Valkey counts these, in the span of so many seconds that is now."""
    return f"limit:{what}:{int(time.time()) // seconds}"


def _too_many(who: str, seconds: int) -> ApiError:
    return ApiError(
        429, f"too many of these from {who}; try again in {max(1, seconds // 60)} minutes"
    )
