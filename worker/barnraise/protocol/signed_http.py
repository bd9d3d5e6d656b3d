"""Send signed requests to a coordinator and check its answers.

Workers and other mirrors use the same client. Each request carries a token that is bound to the
receiving mirror's key, the method, the path and the body. Answers are bounded in bytes and in time,
and never compressed: what a few bytes stand for has no bound.
A sender with a wrong clock signs with the mirror's own time, which it learns from a signed 401.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from barnraise.errors import BarnraiseError, MessageError
from barnraise.protocol.answer_deadline import AnswerDeadline, LimitedRequest
from barnraise.protocol.clock import REQUEST_CLOCK_SECONDS, estimate_offset
from barnraise.protocol.coordinator_messages import Problem, ServerTime
from barnraise.protocol.http_client import describe_failure, describe_route, open_http_client
from barnraise.protocol.messages import Signed
from barnraise.protocol.signing import Identity, open_signed

API = "/api/v1"
RAW_HEADERS = {"Accept-Encoding": "identity"}
CONNECT_SECONDS = 15.0  # until a connection is there, at most
TOO_SLOW = 504  # the HTTP status of a gateway that has waited too long

Answer = TypeVar("Answer", bound=BaseModel)


class RequestFailedError(BarnraiseError):
    """The other side gave no answer that can be used; nothing was read from it.

    `status` is the HTTP status, 0 where there was no answer at all, `TOO_SLOW` where it took too
    long.
    """

    def __init__(self, sentence: str, status: int = 0) -> None:
        self.status = status
        super().__init__(sentence)


class ProblemError(BarnraiseError):
    """The other side refuses the request: `problem` says why, `status` is the HTTP status.

    The site logs `request_id`, so that a person can find the line that belongs to an error.
    """

    def __init__(self, problem: Problem, status: int, request_id: str) -> None:
        self.problem = problem
        self.status = status
        self.request_id = request_id
        super().__init__(problem.error)


@dataclass(frozen=True)
class HttpOptions:
    """How to send requests, and how long and large an answer may be."""

    user_agent: str = "barnraise"
    timeout_seconds: float = 15.0  # between two pieces of an answer
    max_seconds: float = 120.0  # for all of a request and its answer
    max_bytes: int = 1 << 20
    clock: Callable[[], float] = time.time


def read_raw(response: httpx.Response, content: bytearray, most: int, name: str) -> None:
    """Append the body of an answer of at most so many bytes to `content`, as it travels.

    Raises:
        RequestFailedError: the answer is compressed, or has too many bytes.
    """
    if response.headers.get("content-encoding", "identity") != "identity":
        raise RequestFailedError(
            f"{name} sent a compressed answer, which was not asked for and is not unpacked",
            response.status_code,
        )
    for piece in response.iter_raw():
        content += piece
        if len(content) > most:
            raise RequestFailedError(
                f"{name} sent more than {most:,} bytes and was cut off", response.status_code
            )


class SignedHttpClient:
    """Talk to one mirror's API in the name of one identity.

    `key` is the mirror's public key. Requests are addressed to it, so that one mirror cannot pass
    them on to another; while it is empty, requests are sent without a signature. `name` stands for
    the mirror in error messages.
    """

    def __init__(
        self,
        url: str,
        identity: Identity,
        key: str = "",
        name: str = "",
        options: HttpOptions | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.identity = identity
        self.key = key
        self.name = name or self.url
        self.body_bytes = 0  # of requests and answers together
        self._options = options or HttpOptions()
        self._clock_offset = 0.0  # the mirror's clock minus ours, in seconds
        self._deadline = AnswerDeadline(self._options.max_seconds)
        self._is_clock_known = False  # whether the mirror has stated its time or accepted ours
        self._http = open_http_client(
            timeout=httpx.Timeout(
                self._options.timeout_seconds,
                connect=min(self._options.timeout_seconds, CONNECT_SECONDS),
            ),
            headers={"User-Agent": self._options.user_agent, **RAW_HEADERS},
        )

    def now(self) -> float:
        """Return seconds since 1970 by the mirror's clock, as far as it is known."""
        return self._options.clock() + self._clock_offset

    @property
    def clock_offset(self) -> float | None:
        """Return the mirror's clock minus ours, in seconds; None while it is not known.

        It is zero where the mirror accepts our time, which may differ from its own by some seconds.
        """
        return self._clock_offset if self._is_clock_known else None

    def set_server_time(self, server_time: float, round_trip: float) -> None:
        """Sign by the mirror's clock, which it read in the `round_trip` seconds before now."""
        now = self._options.clock()
        offset = estimate_offset(server_time, now, round_trip, self._clock_offset)
        if offset is not None:
            self._clock_offset = offset
            self._is_clock_known = True

    def request(
        self, method: str, path: str, message: BaseModel | None, shape: type[Answer]
    ) -> Answer:
        """Send one signed request below `/api/v1` and return its checked answer.

        Raises:
            RequestFailedError: no answer came, it was too large or too slow, or it is not an
                answer of the API; or the client is closed.
            ProblemError: the mirror refuses.
        """
        body = b"" if message is None else message.model_dump_json().encode()
        request_id = secrets.token_hex(16)
        started = time.monotonic()
        status, content = self._send(method, API + path, body, request_id)
        try:
            if status < 400:
                answer = shape.model_validate_json(content)
                self._is_clock_known |= bool(self.key)  # it has checked when we signed
                return answer
            problem = Problem.model_validate_json(content)
            if status == 401 and problem.time and self._learn_time(problem.time, started):
                status, content = self._send(method, API + path, body, request_id)
                if status < 400:
                    return shape.model_validate_json(content)
                problem = Problem.model_validate_json(content)
        except ValidationError:
            cut_off = content[:1] == b"{" and not content.rstrip().endswith(b"}")
            raise RequestFailedError(
                f"{self.name} answered {status} with something that is not Barnraise's API"
                + describe_route(self.url)
                + (" (it may be cut off)" if cut_off else ""),
                status,
            ) from None
        raise ProblemError(problem, status, request_id)

    def authorize(self, method: str, path: str, body: bytes) -> str:
        """Return the header that says who sends a request; "" while the mirror is not known."""
        if not self.key:
            return ""
        token = self.identity.sign_request(self.key, method, path, body, self.now())
        return f"Barnraise {token}"

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _send(self, method: str, path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        """Send one request, signed if the mirror's key is known.

        Returns:
            The status and the body of the answer.
        """
        sent = {"X-Request-ID": request_id}
        if body:
            sent["Content-Type"] = "application/json"
        if authorization := self.authorize(method, path, body):
            sent["Authorization"] = authorization
        content = bytearray()
        extensions = {"trace": self._deadline.remember_connection}
        request = LimitedRequest()
        try:
            with (
                self._deadline.limit() as request,
                self._http.stream(
                    method, self.url + path, content=body, headers=sent, extensions=extensions
                ) as response,
            ):
                read_raw(response, content, self._options.max_bytes, self.name)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            if request.has_timed_out:
                raise self._too_slow() from None
            reason = describe_failure(error)
            raise RequestFailedError(f"{self.name} does not answer ({reason})") from None
        except RuntimeError:  # httpx's, if another thread has closed the client
            if not self._http.is_closed:
                raise
            raise RequestFailedError(f"{self.name} was not asked: the client is closed") from None
        finally:
            self.body_bytes += len(body) + len(content)
        if request.has_timed_out:
            raise self._too_slow()
        return response.status_code, bytes(content)

    def _too_slow(self) -> RequestFailedError:
        return RequestFailedError(
            f"{self.name} takes more than {self._options.max_seconds:g} seconds for one answer and "
            "was cut off",
            TOO_SLOW,
        )

    def _learn_time(self, signed: Signed, started: float) -> bool:
        """Adopt the mirror's own signed time; return whether that changes what we would sign.

        `started` is the monotonic time of the request.
        """
        try:
            server_time = open_signed(signed, "time", ServerTime, self.key).time
        except MessageError:
            return False
        before = self._clock_offset
        self.set_server_time(server_time, time.monotonic() - started)
        return abs(self._clock_offset - before) > REQUEST_CLOCK_SECONDS
