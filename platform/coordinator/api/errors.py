"""Every refusal as a wire.Problem: one shape, a sentence, and the fields it is about."""

import redis.exceptions
from django.core.exceptions import RequestDataTooBig
from django.db import InterfaceError, OperationalError
from django.http import Http404, HttpRequest, HttpResponse
from ninja import NinjaAPI
from ninja.errors import HttpError, ValidationError

from barnraise.errors import SpecError
from coordinator.api.authentication import ApiError
from coordinator.lib import site_identity
from coordinator.ops.error_pages import outage_message, problem_response

GONE = (OperationalError, InterfaceError, redis.exceptions.RedisError)


def install_error_handlers(api: NinjaAPI) -> None:
    api.add_exception_handler(ApiError, _refusal)
    api.add_exception_handler(ValidationError, _invalid)
    api.add_exception_handler(SpecError, _senseless)
    api.add_exception_handler(
        HttpError, lambda request, error: problem_response(error.status_code, _sentence(error))
    )
    api.add_exception_handler(
        Http404, lambda request, error: problem_response(404, "there is nothing at this address")
    )
    api.add_exception_handler(
        RequestDataTooBig,
        lambda request, error: problem_response(413, "send less than 1 MiB at once"),
    )
    for kind in GONE:
        api.add_exception_handler(kind, _gone)


def _refusal(request: HttpRequest, error: ApiError) -> HttpResponse:
    return problem_response(
        error.status,
        error.sentence,
        error.fields,
        site_identity.signed_time() if error.status == 401 else None,
    )


def _invalid(request: HttpRequest, error: ValidationError) -> HttpResponse:
    """Places are (source, parameter, field…): the field's dotted name is what the sender knows it by."""
    fields: dict[str, str] = {}
    for found in error.errors:
        where = found["loc"][2:] if found["loc"][0] == "body" else found["loc"][1:]
        fields.setdefault(".".join(str(part) for part in where) or "body", found["msg"])
    first = next(iter(fields.items()), ("body", "is malformed"))
    return problem_response(422, f"{first[0]}: {first[1]}", fields)


def _senseless(request: HttpRequest, error: SpecError) -> HttpResponse:
    """What a run itself refuses, at the fields it is about."""
    return problem_response(422, str(error), error.problems)


def _gone(request: HttpRequest, error: Exception) -> HttpResponse:
    if sentence := outage_message(error):
        return problem_response(503, sentence)
    raise error  # our own mistake


def _sentence(error: HttpError) -> str:
    return "the body is not JSON" if error.status_code == 400 else str(error)
