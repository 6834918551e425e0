"""Request bodies: read within a limit, small ones as JSON, large ones to disk."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import IO, Any, TypeVar

from anyio import to_thread
from fastapi import Request
from pydantic import BaseModel, ValidationError

from lanewise.loaders import AdapterDigest

from ..errors import InvalidRequest, RequestTimeout, TooLarge
from .dependencies import service_of
from .errors import invalid_fields

_BATCH = 2**20
_QUICKLY_READ = 2**16  # bytes of JSON that take well under a millisecond
Model = TypeVar("Model", bound=BaseModel)


async def read_json(request: Request, model: type[Model], limit: int) -> Model:
    """The body as `model`. Raises TooLarge over `limit` bytes, InvalidRequest naming the field.

    pydantic's parser bounds nesting, so a deep body is refused like any other that is not JSON.
    """
    body = bytearray()
    async for chunk in _limited(request, limit):
        body += chunk
    if len(body) <= _QUICKLY_READ:
        return _parse(model, body)
    return await to_thread.run_sync(_parse, model, body)


def _parse(model: type[Model], body: bytearray) -> Model:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        raise invalid_fields(problems) from None


def described(model: type[BaseModel]) -> dict[str, Any]:
    """What /docs shows of a body that `read_json` reads, since FastAPI does not read it."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inlined(part: Any) -> Any:
        if isinstance(part, list):
            return [inlined(item) for item in part]
        if not isinstance(part, dict):
            return part
        if reference := part.get("$ref"):
            return inlined(definitions[reference.rpartition("/")[2]])
        return {name: inlined(item) for name, item in part.items()}

    content = {"application/json": {"schema": inlined(schema)}}
    return {"requestBody": {"required": True, "content": content}}


async def receive_file(request: Request, file: Path, digest: AdapterDigest, limit: int) -> None:
    """Write the body to `file` and hash it while it arrives, holding at most a batch of it in memory.

    Raises TooLarge over `limit` bytes, InvalidRequest when it is not as long as `content-length` says.
    """
    size, batch = 0, bytearray()
    out = await to_thread.run_sync(file.open, "xb")
    try:
        async for chunk in _limited(request, limit):
            size += len(chunk)
            batch += chunk
            if len(batch) >= _BATCH:
                await to_thread.run_sync(_append, out, digest, batch)
                batch = bytearray()
        await to_thread.run_sync(_append, out, digest, batch)
    finally:
        await to_thread.run_sync(out.close)
    declared = request.headers.get("content-length")
    if declared is not None and int(declared) != size:
        raise InvalidRequest(f"the body has {size} bytes; content-length says {declared}", param="body")


async def _limited(request: Request, limit: int) -> AsyncGenerator[bytes]:
    declared = request.headers.get("content-length", "0")
    size = int(declared) if declared.isdecimal() else 0
    if size <= limit:
        size = 0
        async for chunk in _arriving(request):
            size += len(chunk)
            if size > limit:
                break
            yield chunk
    if size > limit:
        raise TooLarge(f"the body has {size} bytes or more; expected at most {limit}", param="body")


async def _arriving(request: Request) -> AsyncGenerator[bytes]:
    """The body's pieces. Raises RequestTimeout after a silence, Unavailable as soon as the server stops."""
    service = service_of(request)
    stall_s = service.settings.body_stall_s
    pieces = request.stream()
    stopping = asyncio.ensure_future(service.stopping.wait())
    piece: asyncio.Future[bytes] | None = None
    try:
        while not service.stopping.is_set():
            piece = asyncio.ensure_future(anext(pieces, b""))  # the last piece is empty as well
            await asyncio.wait((piece, stopping), timeout=stall_s, return_when=asyncio.FIRST_COMPLETED)
            if piece.done():
                if not piece.result():
                    return
                yield piece.result()
            elif not stopping.done():
                raise RequestTimeout(f"nothing of the body arrived for {stall_s:g} s; send it again")
        service.check_open()
    finally:
        for task in (stopping, piece):
            if task is not None:
                task.cancel()


def _append(out: IO[bytes], digest: AdapterDigest, data: bytearray) -> None:
    digest.update(data)
    out.write(data)
