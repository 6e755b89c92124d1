"""Typed errors: each class says what the failure means to the caller.

`rpc/errors.py` maps them to gRPC status codes in one table. The loader raises
`loader.errors.CheckpointError`, which the engine passes through unchanged.
"""


class EngineError(Exception):
    """Base of every error the engine raises on purpose."""


class ConfigError(EngineError):
    """A setting, or a combination of settings, that cannot work. Raised at start."""


class InvalidRequest(EngineError):
    """The request can never be served as written.

    Attributes:
        field: name of the offending request or sampling field.
    """

    def __init__(self, field: str, reason: str) -> None:
        # A reason may quote the caller, and no interface can send the lone surrogates that JSON can hold.
        super().__init__(f"{field}: {reason}".encode(errors="backslashreplace").decode())
        self.field = field


class OverCapacity(EngineError):
    """The queue is full; the same request may succeed later.

    Attributes:
        num_queued: requests in that queue.
    """

    def __init__(self, message: str, num_queued: int = 0) -> None:
        super().__init__(message)
        self.num_queued = num_queued


class EngineStopped(EngineError):
    """The engine is draining or stopped and takes no more work."""


class RequestFault(EngineError):
    """Serving one request failed inside the engine; other requests go on."""


class DeviceFault(EngineError):
    """The device failed; every request in flight fails with it."""


class StepFault(DeviceFault):
    """One step failed and the device lives on; the requests in that step fail with it."""
