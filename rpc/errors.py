"""One table from an error's type to its gRPC status, and the one place that ends a call with it.

A bad field travels as `google.rpc.BadRequest` in the status details, and when to try again as
`google.rpc.RetryInfo`, so that a client needs no parsing.
Cancellation is not an error here: CancelledError passes through untouched.
What the engine calls a field and what the caller called it can differ: `renamed` translates.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from engine.errors import ConfigError, DeviceFault, EngineStopped, InvalidRequest, OverCapacity, RequestFault
from loader.errors import CheckpointError
from rpc.pace import Pace

logger = logging.getLogger(__name__)


class Unauthenticated(Exception):
    """The call does not say who makes it."""


STATUS_CODES: dict[type[Exception], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    OverCapacity: grpc.StatusCode.RESOURCE_EXHAUSTED,
    EngineStopped: grpc.StatusCode.UNAVAILABLE,
    RequestFault: grpc.StatusCode.INTERNAL,
    DeviceFault: grpc.StatusCode.INTERNAL,
    CheckpointError: grpc.StatusCode.FAILED_PRECONDITION,
    ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
}

MIN_REMAINING_SECONDS = 0.001
"""grpc rounds a deadline up to whole milliseconds on the wire: so much may be left of one that has passed."""

MAX_MESSAGE_BYTES = 1200
"""Clients may refuse trailers above 8 KiB. A message is there percent-encoded (up to 3 times as long) and
twice in base64 (4/3 each), 6.7 KiB in all."""


def status_code(error: Exception) -> grpc.StatusCode:
    """INTERNAL for a type the table does not know."""
    for kind in type(error).__mro__:
        if kind in STATUS_CODES:
            return STATUS_CODES[kind]
    return grpc.StatusCode.INTERNAL


def to_status(error: Exception, retry_after: float | None = None) -> grpc.Status:
    """The status of `error`, with its field as a BadRequest violation where it names one.

    `retry_after`, in seconds, goes with OverCapacity.
    """
    code = status_code(error)
    known = any(kind in STATUS_CODES for kind in type(error).__mro__)
    message = str(error) if known else f"internal error: {type(error).__name__}"
    message = message.encode()[:MAX_MESSAGE_BYTES].decode(errors="ignore")
    status = status_pb2.Status(code=code.value[0], message=message)
    if isinstance(error, InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=message)
        _attach(status, error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, OverCapacity) and retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(retry_after * 1000))
        _attach(status, error_details_pb2.RetryInfo(retry_delay=delay))
    return rpc_status.to_status(status)


def _attach(status: status_pb2.Status, message: Message) -> None:
    detail = any_pb2.Any()
    detail.Pack(message)
    status.details.append(detail)


async def abort(
    context: grpc.aio.ServicerContext[Any, Any], error: Exception, retry_after: float | None = None
) -> NoReturn:
    """End the call with the status of `error`. Raises what `_end` does."""
    status = to_status(error, retry_after)
    await _end(context, status.code, status.details, status.trailing_metadata)


async def _end(
    context: grpc.aio.ServicerContext[Any, Any], code: grpc.StatusCode, details: str, metadata: Any = ()
) -> NoReturn:
    """Raises grpc.aio.AbortError, as `context.abort` does, or CancelledError where nobody is there to be told."""
    try:
        await context.abort(code, details, metadata)
    except grpc.aio.InternalError:  # the call is over: its deadline has passed, or the peer has gone
        raise asyncio.CancelledError from None


@asynccontextmanager
async def reported(context: grpc.aio.ServicerContext[Any, Any], pace: Pace | None = None) -> AsyncIterator[None]:
    """Turn an exception of the body into the call's status; `pace` tells when to try again."""
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except grpc.aio.InternalError:  # of a write: the call is over
        raise asyncio.CancelledError from None
    except Exception as error:
        if status_code(error) is grpc.StatusCode.INTERNAL:
            logger.exception("call failed")
        queue = error.num_queued if isinstance(error, OverCapacity) else None
        await abort(context, error, None if pace is None or queue is None else pace.retry_after(queue))


@asynccontextmanager
async def within_deadline(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Hold the body to the call's deadline: a client that was cut off cannot cancel.

    A call that comes too late does not run the body.
    """
    remaining = context.time_remaining()
    if remaining is not None and remaining <= MIN_REMAINING_SECONDS:
        await _end(context, grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed before the call began")
    try:
        async with asyncio.timeout(remaining) as scope:
            yield
    except TimeoutError:
        if scope.expired():
            await _end(context, grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed")
        raise


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Have a refusal name the caller's field where the engine calls it otherwise."""
    try:
        yield
    except InvalidRequest as error:
        if error.field not in names:
            raise
        reason = str(error).removeprefix(f"{error.field}: ")
        raise InvalidRequest(names[error.field], reason) from error
