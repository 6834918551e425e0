"""Answers as they leave: streams of server-sent events, and whole bodies that a vanished client aborts."""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ..engines.protocol import Chunk, Chunks
from ..metrics import Watch
from .errors import as_lanewise


class EventStream(StreamingResponse):
    """A stream of chunks as `data:` lines, ended by `[DONE]`, or by an error event and no `[DONE]`.

    However it ends, finished, failed or with the client gone, `held` is closed: engine call and lease.
    """

    media_type = "text/event-stream"

    def __init__(
        self, chunks: Chunks, watch: Watch, held: AsyncExitStack, headers: Mapping[str, str]
    ) -> None:
        super().__init__(_events(chunks, watch), headers={"cache-control": "no-cache", **headers})
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            await super().__call__(scope, receive, send)


async def _events(chunks: Chunks, watch: Watch) -> AsyncIterator[bytes]:
    try:
        async for chunk in chunks:
            watch.chunk(chunk)
            yield _event(chunk)
    except Exception as error:  # noqa: BLE001  the status is sent: an error can only be told as an event
        failure = as_lanewise(error)
        watch.status = str(failure.status.value)
        yield _event(failure.body)
    else:
        watch.status = "200"
        yield b"data: [DONE]\n\n"


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def unless_gone(request: Request, work: Coroutine[Any, Any, Chunk]) -> Chunk:
    """Await `work`, or cancel it and raise ClientDisconnect when the client goes away first.

    The request's body must have been read.
    """
    answer = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        raise ClientDisconnect
    finally:
        for task in (answer, gone):
            task.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
