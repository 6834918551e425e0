"""Every error becomes OpenAI's body here, whoever raised it, and nowhere else."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from lanewise.loaders import InvalidAdapter, LoaderError

from ..catalog import FACTORS_FILE
from ..errors import InternalError, InvalidRequest, LanewiseError, NotAllowed, NotFound, Unprocessable

_MAX_ECHO = 200
_MAX_DETAILS = 20
_SCALARS = {"str", "int", "float", "bool"}
_log = logging.getLogger(__name__)


def install(app: FastAPI) -> None:
    """Answer every error that reaches the app; what nobody expected is left to the middleware."""
    for kind in (LanewiseError, LoaderError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _handle)


def as_lanewise(error: Exception) -> LanewiseError:
    """The error in our own terms. One that nobody expected is logged and becomes an InternalError."""
    match error:
        case LanewiseError():
            return error
        case InvalidAdapter():
            findings = [asdict(finding) for finding in error.findings[:_MAX_DETAILS]]
            param = error.findings[0].where
            return Unprocessable(str(error), param=param, code="invalid_adapter", details=findings)
        case LoaderError():
            return Unprocessable(str(error), param=FACTORS_FILE, code="unsafe_file")
        case RequestValidationError():
            return invalid_fields(error.errors())
        case HTTPException(status_code=HTTPStatus.NOT_FOUND):
            return NotFound("no such path; see /docs", code="unknown_path")
        case HTTPException(status_code=HTTPStatus.METHOD_NOT_ALLOWED):
            return NotAllowed("the path does not take this method; see /docs", code="method_not_allowed")
        case HTTPException():
            return InvalidRequest(str(error.detail))
        case _:
            _log.error("unexpected error", exc_info=error)
            return InternalError(
                "the server met a bug of its own; its log has the request id", code="internal"
            )


def invalid_fields(problems: Sequence[Mapping[str, Any]]) -> InvalidRequest:
    """Pydantic's problems as one error: the first named as `param`, a few in the details, all counted."""
    found = [(_path(problem["loc"]), _message(problem)) for problem in problems[:_MAX_DETAILS]]
    where, message = found[0]
    details = [{"where": path, "problem": text} for path, text in found] if len(found) > 1 else []
    rest = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return InvalidRequest(f"{where or 'body'}: {message}{rest}", param=where or None, details=details)


def json_response(error: LanewiseError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(error.body, error.status, headers={**error.headers, **(headers or {})})


async def _handle(request: Request, error: Exception) -> JSONResponse:
    return json_response(as_lanewise(error))


def _message(problem: Mapping[str, Any]) -> str:
    return "is not a known field" if problem["type"] == "extra_forbidden" else str(problem["msg"])


def _path(location: Iterable[str | int]) -> str:
    """`messages.0.content`: the field, without pydantic's names for request parts and union branches."""
    parts = [str(part) for part in location if part not in ("body", "path", "query", "header")]
    names = [part for part in parts if part.replace("-", "_").isidentifier() or part.isdecimal()]
    return ".".join(name for name in names if name not in _SCALARS and "constrained" not in name)[:_MAX_ECHO]
