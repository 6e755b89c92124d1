"""One table from an error's type to its HTTP status and OpenAI's error body.

The body is `{"error": {"message", "type", "param", "code"}}`, also as the last event of a stream that failed.
"""

import logging
import math
from typing import Any

from starlette.responses import JSONResponse

from engine.errors import DeviceFault, EngineStopped, InvalidRequest, OverCapacity, RequestFault
from loader.errors import shown
from rpc.errors import Unauthenticated
from rpc.pace import Pace

logger = logging.getLogger(__name__)


class UnknownModel(InvalidRequest):
    """The request names a model that is not served here."""

    def __init__(self, name: str, served: str) -> None:
        super().__init__("model", f"{shown(name)} is not served here, {shown(served)} is")


class TooLarge(Exception):
    """The body is longer than the server takes."""


class TooSlow(Exception):
    """The body stopped before its end."""


_TABLE: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (UnknownModel, 404, "invalid_request_error", "model_not_found"),
    (InvalidRequest, 400, "invalid_request_error", None),
    (Unauthenticated, 401, "invalid_request_error", "invalid_api_key"),
    (TooSlow, 408, "invalid_request_error", "request_timeout"),
    (TooLarge, 413, "invalid_request_error", "request_too_large"),
    (OverCapacity, 429, "rate_limit_error", "rate_limit_exceeded"),
    (EngineStopped, 503, "server_error", "service_unavailable"),
    (RequestFault, 500, "server_error", None),
    (DeviceFault, 500, "server_error", None),
)


def error_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body; what the table does not know is a 500 that names only the error's type. A 500 is logged."""
    status, kind, code = next((row[1:] for row in _TABLE if isinstance(error, row[0])), (500, None, None))
    if status == 500:
        logger.error("call failed", exc_info=error)
    if kind is None:
        return 500, body(f"internal error: {type(error).__name__}", "server_error")
    return status, body(str(error), kind, param=getattr(error, "field", None), code=code)


def body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: Exception, pace: Pace) -> JSONResponse:
    """The answer to a call that failed before its answer began; `pace` tells when to try again."""
    status, content = error_body(error)
    headers = {}
    if isinstance(error, OverCapacity):
        seconds = pace.retry_after(error.num_queued)
        # The header has whole seconds only; OpenAI's clients read the finer one first.
        headers = {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(round(seconds * 1000))}
    elif isinstance(error, Unauthenticated):
        headers = {"www-authenticate": "Bearer"}
    return JSONResponse(content, status, headers)
