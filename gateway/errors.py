"""Errors as OpenAI writes them: one table from our codes to JSON bodies, headers and SSE events.

The body is built from data that is finite and JSON-safe by construction, so that reporting a bad
value can never fail itself.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Send

from headrace.errors import ErrorInfo, RequestError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    499: "request_aborted",
    503: "service_unavailable_error",
}
_DEFAULT_RETRY_AFTER_SECONDS = 1.0
_INTERNAL = ErrorInfo(
    code="internal_error",
    message="the server failed while handling this request; its log has the details",
    http_status=500,
)


class BodyTooLarge(RequestError):
    """The body is larger than the server reads."""

    code = "body_too_large"
    http_status = 413


class EncodedBody(RequestError):
    """The body is compressed; its size could not be bounded before it is unpacked."""

    code = "content_encoding_not_supported"
    http_status = 415


class NotReady(RequestError):
    """No replica of the model can serve yet; the body says how far the start is."""

    code = "not_ready"
    http_status = 503

    def __init__(self, message: str, *, retry_after_seconds: float, extra: dict[str, Any]) -> None:
        super().__init__(message, retry_after_seconds=retry_after_seconds)
        self.extra = extra


def error_info(error: BaseException) -> ErrorInfo:
    """Return what may be told of an error: request errors in full, all others not at all."""
    return error.info() if isinstance(error, RequestError) else _INTERNAL


def error_object(info: ErrorInfo, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return {"error": {message, type, param, code[, reason], ...extra}}."""
    error_type = _TYPES.get(info.http_status, "server_error")
    fields = {"message": info.message, "type": error_type, "param": info.param, "code": info.code}
    reason = {"reason": info.reason} if info.reason is not None else {}
    return {"error": {**fields, **reason, **(extra or {})}}


def error_response(error: BaseException) -> Response:
    """Return the JSON response for an error, with Retry-After where waiting helps."""
    info = error_info(error)
    extra = error.extra if isinstance(error, NotReady) else None
    headers = {}
    if info.http_status == 401:
        headers["www-authenticate"] = 'Bearer realm="headrace"'
    seconds = info.retry_after_seconds
    if seconds is None and info.http_status in (429, 503):
        seconds = _DEFAULT_RETRY_AFTER_SECONDS
    if seconds is not None:
        headers["retry-after"] = str(max(1, math.ceil(seconds)))
    return JSONBytes(error_object(info, extra), status_code=info.http_status, headers=headers)


async def send_json(send: Send, content: Any) -> None:
    """Answer 200 with JSON."""
    body = msgspec.json.encode(content)
    headers = [
        (b"content-length", str(len(body)).encode()),
        (b"content-type", b"application/json"),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class JSONBytes(Response):
    """A JSON response encoded by msgspec, which writes no NaN."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)
