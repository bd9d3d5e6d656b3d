"""Authenticate requests and limit their rate.

A machine or a mirror signs each single request with its key; a person's script sends a token.
"""

import secrets
import time
from collections.abc import Callable

from django.http import HttpRequest
from django.utils import timezone

from barnraise.errors import MessageError
from barnraise.protocol.ip_addresses import parse_ip
from barnraise.protocol.signing import check_request
from coordinator.accounts.models import Machine
from coordinator.fleet.report_queries import machine_for_key
from coordinator.lib import site_identity
from coordinator.lib.period_counters import count_in_period, counter_key
from coordinator.lib.subscriber_network import subscriber_network
from coordinator.lib.valkey import valkey_client
from coordinator.ops.read_only import SAFE_METHODS
from coordinator.ops.write_limits import REFUSAL, count_write
from coordinator.replication import mirror_list
from coordinator.tokens.models import Token

SIGNATURE_SCHEME = "Barnraise "
BEARER_SCHEME = "Bearer "
# A request id is remembered longer than its signature is valid, whichever clock is ahead.
REQUEST_ID_SECONDS = 180
LAST_SEEN_SECONDS = 60.0  # between two writes of a machine's `last_seen`
# Failed authentications (wrong tokens, unknown keys) from one network.
MAX_FAILURES = 120
FAILURES_SECONDS = 600
MAX_TOKEN_REQUESTS = 300  # with one token
TOKEN_REQUESTS_SECONDS = 60
# Of one machine: twice what the fastest run needs, so that no machine can fill a queue alone.
MAX_MACHINE_REQUESTS = 600
MACHINE_REQUESTS_SECONDS = 60


class ApiError(Exception):
    """An error response.

    Attributes:
        status: The HTTP status.
        sentence: What is wrong and what to do next.
        fields: A sentence for each field that it concerns, by dotted name.
    """

    def __init__(self, status: int, sentence: str, fields: dict[str, str] | None = None) -> None:
        self.status = status
        self.sentence = sentence
        self.fields = fields or {}
        super().__init__(sentence)


def authenticate_machine(request: HttpRequest) -> Machine:
    """Return the machine that signed this request for this mirror, method, path and body.

    Raises:
        ApiError: The signature is missing or wrong, the request was sent before, the machine is
            unknown or revoked, or it sends too many requests.
    """
    key, request_id = _verify_signature(request, "your machine's key")
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
    _register_request(key, request_id, machine)
    now = timezone.now()
    if machine.last_seen is None or (now - machine.last_seen).total_seconds() > LAST_SEEN_SECONDS:
        Machine.objects.filter(pk=machine.pk).update(last_seen=now)
    return machine


def authenticate_mirror(request: HttpRequest) -> str:
    """Return the key of the mirror that signed this request.

    Raises:
        ApiError: The signature is missing or wrong, the request was sent before, or the key
            belongs to no mirror of the list, or to an expelled one.
    """
    key, request_id = _verify_signature(request, "your mirror's key")
    newest = mirror_list.newest_list()
    if newest is None:
        raise ApiError(403, "this site is no mirror of others: it has no mirror list")
    mirror = newest.find(key)
    if mirror is None:
        enforce_rate_limit(request, "refused", MAX_FAILURES, FAILURES_SECONDS)
        raise ApiError(401, f"the key {key[:8]}… is no mirror of list {newest.version}")
    if mirror.expelled:
        raise ApiError(403, f"the mirror {mirror.name} was expelled by list {newest.version}")
    _register_request(key, request_id)
    return key


def _verify_signature(request: HttpRequest, with_what: str) -> tuple[str, str]:
    """Return (key, request id) of a signed request."""
    header = request.headers.get("Authorization", "")
    if not header.startswith(SIGNATURE_SCHEME):
        raise ApiError(401, f"sign this request with {with_what}: Authorization: Barnraise <token>")
    token = header.removeprefix(SIGNATURE_SCHEME)
    own_key = site_identity.identity().key
    method = request.method or ""
    path = request.get_full_path()
    try:
        return check_request(token, own_key, method, path, request.body, time.time())
    except MessageError as error:
        raise ApiError(401, str(error)) from None


def _register_request(key: str, request_id: str, machine: Machine | None = None) -> None:
    """Refuse a repeated request, and too many requests of one machine, in one trip to Valkey.

    A replay may come from anybody, so it does not count against the machine.
    """
    # Distinguishes a retry of our own, after a broken connection to Valkey, from a replay.
    nonce = secrets.token_hex(8)
    counter = ""
    if machine:
        counter = counter_key(f"machine:{machine.pk}", MACHINE_REQUESTS_SECONDS)
    with valkey_client().pipeline(transaction=False) as pipe:
        pipe.set(f"jti:{key}:{request_id}", nonce, nx=True, get=True, ex=REQUEST_ID_SECONDS)
        if counter:
            pipe.incr(counter)
            pipe.expire(counter, MACHINE_REQUESTS_SECONDS)
        previous, *count = pipe.execute()
    if previous not in (None, nonce):
        if counter:
            valkey_client().decr(counter)
        raise ApiError(401, "this request was made before; sign each one afresh")
    if count and count[0] > MAX_MACHINE_REQUESTS:
        raise _rate_limit_error("this machine", MACHINE_REQUESTS_SECONDS)


def token_auth(scope: str) -> Callable[[HttpRequest], Token]:
    """Return an authenticator for personal tokens with this scope; "" accepts any token.

    The authenticator raises ApiError.
    """

    def authenticate_token(request: HttpRequest) -> Token:
        header = request.headers.get("Authorization", "")
        if not header.startswith(BEARER_SCHEME):
            raise ApiError(
                401,
                "send a personal token: Authorization: Bearer brn_…; create one under API tokens",
            )
        token = Token.find_by_text(header.removeprefix(BEARER_SCHEME).strip()[:200])
        if token is None or not token.is_valid:
            enforce_rate_limit(request, "refused", MAX_FAILURES, FAILURES_SECONDS)
            raise ApiError(
                401,
                "token unknown, revoked or expired: create one under Account → API tokens",
            )
        enforce_rate_limit(request, "token", MAX_TOKEN_REQUESTS, TOKEN_REQUESTS_SECONDS, token)
        if request.method not in SAFE_METHODS and not count_write(token.user.pk):
            raise ApiError(429, REFUSAL)
        if scope and scope not in token.scopes:
            raise ApiError(
                403,
                f"this token may not do that: it has the scopes {', '.join(token.scopes)}, "
                f"not {scope}",
            )
        token.user.renounce_staff_powers()
        token.record_use()
        return token

    return authenticate_token


def machine_or_token_auth(scope: str) -> Callable[[HttpRequest], Machine | Token]:
    """Return an authenticator for machines and for personal tokens with this scope."""
    authenticate_token = token_auth(scope)

    def authenticate_either(request: HttpRequest) -> Machine | Token:
        if request.headers.get("Authorization", "").startswith(BEARER_SCHEME):
            return authenticate_token(request)
        return authenticate_machine(request)

    return authenticate_either


def client_address(request: HttpRequest) -> str:
    """Return the address that a request came from, as `lib.trusted_proxies` finds it."""
    return request.META.get("REMOTE_ADDR", "")[:45]


def source_ip(request: HttpRequest) -> str | None:
    """Return the IP address that a request came from, for the machine that sent it.

    Behind a router a machine cannot see it. None where requests come from no IP address.
    """
    try:
        return str(parse_ip(client_address(request)))
    except ValueError:
        return None


def enforce_rate_limit(
    request: HttpRequest, name: str, most: int, seconds: int, token: Token | None = None
) -> None:
    """Count a request, per token or else per network that one subscriber has.

    Args:
        request: The request.
        name: What is counted.
        most: The number of requests that are allowed in each period.
        seconds: The length of a period.
        token: The token that authenticated the request, if any.

    Raises:
        ApiError: There were more than `most` in this period.
    """
    sender = token.pk if token else subscriber_network(client_address(request))
    if count_in_period(f"{name}:{sender}", seconds) > most:
        raise _rate_limit_error("this token" if token else "your address", seconds)


def enforce_machine_limit(machine: Machine, name: str, most: int, seconds: int) -> None:
    """Count a request of a machine that costs much, as `enforce_rate_limit` counts others.

    Raises:
        ApiError: There were more than `most` in this period of so many seconds.
    """
    if count_in_period(f"{name}:{machine.pk}", seconds) > most:
        raise _rate_limit_error("this machine", seconds)


def _rate_limit_error(sender: str, seconds: int) -> ApiError:
    minutes = max(1, seconds // 60)
    return ApiError(429, f"too many requests from {sender}; try again in {minutes} minutes")
