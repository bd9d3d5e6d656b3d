"""Endpoints for other mirrors, which sign their requests as machines do, and the mirror list."""

from typing import Annotated

from django.http import HttpRequest
from ninja import Path, Query

from barnraise.errors import MessageError
from barnraise.protocol.messages import Signed
from barnraise.protocol.mirror_list import MirrorLists
from coordinator.api.authentication import ApiError, authenticate_mirror, enforce_rate_limit
from coordinator.api.errors import EndpointRouter
from coordinator.api.lookups import get_credential
from coordinator.eventlog import truncate
from coordinator.eventlog.writer import read_events
from coordinator.lib import site_identity
from coordinator.replication import (
    encryption,
    mirror_list,
    one_time_codes,
    protocol,
    pull,
    tasks,
)
from coordinator.telemetry.remote import export
from coordinator.telemetry.remote.protocol import SignedTelemetryPage, TelemetryRequest

MAX_PROOFS = 100  # in one response
# Pyright does not know that Ninja's parameter functions are also markers.
Origin = Annotated[str, Path(pattern=r"^[0-9a-f]{32}$")]  # pyright: ignore[reportCallIssue]
Number = Annotated[int, Query(ge=0, lt=1 << 53)]  # pyright: ignore[reportCallIssue]
PageSize = Annotated[int, Query(ge=1, le=protocol.PAGE_EVENTS)]  # pyright: ignore[reportCallIssue]

router = EndpointRouter(tags=["Mirrors"])


@router.get("/mirrors/list")
def get_mirror_list(request: HttpRequest, after: Number = 0) -> MirrorLists:
    """Get the newest mirror list, and all lists that lead to it from version `after`."""
    enforce_rate_limit(request, "lists", 600, 60)
    return MirrorLists(lists=mirror_list.lists_since(after))


@router.get("/mirrors/heads", auth=authenticate_mirror)
def get_log_heads(request: HttpRequest) -> Signed:
    """Get the last event number of every log, signed for the requesting mirror."""
    return site_identity.identity().sign("heads", pull.local_heads(get_credential(request)))


@router.get("/mirrors/logs/{origin}", auth=authenticate_mirror)
def get_log(
    request: HttpRequest,
    origin: Origin,
    after: Number = 0,
    most: PageSize = protocol.PAGE_EVENTS,
) -> protocol.LogPart:
    """Get a log's events from number `after` + 1 on; the log may be another mirror's."""
    events = read_events(origin, after, most)
    page = []
    size = 0
    for event in events:
        size += len(event.body.encode())
        if page and size > protocol.PAGE_BYTES:
            break
        page.append(event)
    has_more = len(page) < len(events) or len(events) == most
    return protocol.LogPart(events=page, more=has_more)


@router.get("/mirrors/fork-evidence", auth=authenticate_mirror)
def get_fork_evidence(request: HttpRequest) -> protocol.ForkEvidenceList:
    """Get both events of each log that signed two events with one number."""
    pairs = truncate.list_fork_proofs()[-MAX_PROOFS:]
    return protocol.ForkEvidenceList(
        proofs=[protocol.ForkEvidence(first=first, second=second) for first, second in pairs]
    )


@router.post("/mirrors/private-data", auth=authenticate_mirror)
def get_private_data(
    request: HttpRequest, wants: protocol.PrivateDataRequest
) -> protocol.EncryptedPrivateData:
    """Get personal data that events name by digest, encrypted to the key in the request."""
    try:
        return encryption.encrypt_private_data(wants)
    except MessageError as error:
        raise ApiError(422, str(error), {"key": str(error)}) from None


@router.post("/mirrors/telemetry", auth=authenticate_mirror)
def get_telemetry(request: HttpRequest, wanted: TelemetryRequest) -> SignedTelemetryPage:
    """Get changes of the machines that report to this mirror, signed for the requesting mirror."""
    return export.build_signed_page(wanted, get_credential(request))


@router.post("/mirrors/change-notice", auth=authenticate_mirror)
def post_change_notice(
    request: HttpRequest, notice: protocol.ChangeNotice
) -> protocol.Acknowledgement:
    """Announce that the mirror that signed this has new events."""
    enforce_rate_limit(request, "change notices", 600, 60)
    tasks.schedule_pull(get_credential(request))
    return protocol.Acknowledgement()


@router.post("/mirrors/used-codes", auth=authenticate_mirror)
def post_used_codes(request: HttpRequest, used: protocol.UsedCodes) -> protocol.Acknowledgement:
    """Announce one-time codes that were used at the mirror that signed this."""
    enforce_rate_limit(request, "used codes", 6000, 60)
    for mark in used.marks:
        one_time_codes.mark_used(mark)
    return protocol.Acknowledgement()
