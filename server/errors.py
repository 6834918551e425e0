"""Everything the server says no with, and the HTTP status each becomes.

    LanewiseError                     status  type
    ├── InvalidRequest                400     invalid_request_error
    ├── NotFound                      404     not_found_error      unknown model, adapter or version
    ├── NotAllowed                    405     invalid_request_error   the path exists, the method does not
    ├── RequestTimeout                408     invalid_request_error   the body stopped arriving
    ├── Conflict                      409     conflict_error       the change does not fit the present state
    ├── TooLarge                      413     invalid_request_error
    ├── Unprocessable                 422     invalid_adapter_error   a push that was read and refused
    ├── Overloaded                    429     rate_limit_error     carries Retry-After
    ├── Unavailable                   503     unavailable_error    starting, stopping; carries Retry-After
    ├── EngineFailure                 500     engine_error         the engine broke; a retry may work
    ├── StorageFailure                507     storage_error        the data folder is full, read-only or gone
    └── InternalError                 500     server_error         a bug of ours; the log has the request id

Foreign errors (loaders', pydantic's, starlette's) are mapped to these in `api/errors.py`, nowhere else.
"""

from collections.abc import Sequence
from http import HTTPStatus
from typing import ClassVar


class LanewiseError(Exception):
    """An error a person can act on. `param` names the field, tensor or file; `code` is machine-readable."""

    status: ClassVar[HTTPStatus]
    type: ClassVar[str]

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        details: Sequence[dict[str, str]] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.details = tuple(details)

    @property
    def body(self) -> dict[str, object]:
        """OpenAI's error object; `details` is ours and present only when there are several findings."""
        error: dict[str, object] = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        if self.details:
            error["details"] = list(self.details)
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        return {}


class InvalidRequest(LanewiseError):
    status, type = HTTPStatus.BAD_REQUEST, "invalid_request_error"


class NotFound(LanewiseError):
    status, type = HTTPStatus.NOT_FOUND, "not_found_error"


class NotAllowed(LanewiseError):
    status, type = HTTPStatus.METHOD_NOT_ALLOWED, "invalid_request_error"


class RequestTimeout(LanewiseError):
    status, type = HTTPStatus.REQUEST_TIMEOUT, "invalid_request_error"

    @property
    def headers(self) -> dict[str, str]:
        return {"connection": "close"}  # the rest of the body is not waited for


class Conflict(LanewiseError):
    status, type = HTTPStatus.CONFLICT, "conflict_error"


class TooLarge(LanewiseError):
    status, type = HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "invalid_request_error"


class Unprocessable(LanewiseError):
    status, type = HTTPStatus.UNPROCESSABLE_ENTITY, "invalid_adapter_error"


class _Retryable(LanewiseError):
    retry_after_s: ClassVar[int] = 1

    @property
    def headers(self) -> dict[str, str]:
        return {"retry-after": str(self.retry_after_s)}


class Overloaded(_Retryable):
    status, type = HTTPStatus.TOO_MANY_REQUESTS, "rate_limit_error"


class Unavailable(_Retryable):
    status, type = HTTPStatus.SERVICE_UNAVAILABLE, "unavailable_error"


class EngineFailure(LanewiseError):
    status, type = HTTPStatus.INTERNAL_SERVER_ERROR, "engine_error"


class StorageFailure(LanewiseError):
    status, type = HTTPStatus.INSUFFICIENT_STORAGE, "storage_error"


class InternalError(LanewiseError):
    status, type = HTTPStatus.INTERNAL_SERVER_ERROR, "server_error"
