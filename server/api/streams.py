"""Answers as they leave: streams of server-sent events, and whole bodies that a vanished client aborts."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from ..engines.protocol import Chunk, Chunks
from ..metrics import Watch
from .errors import as_lanewise

_log = logging.getLogger(__name__)


class EventStream(StreamingResponse):
    """A stream of chunks as `data:` lines, ended by `[DONE]`, or by an error event and no `[DONE]`.

    `running`, the engine call and its lease, is closed when the engine's last chunk is there, `held` when all
    is sent; both also when the client goes away, or reads nothing for `stall_s` seconds while chunks wait.
    They wait in memory; a request's limit of tokens bounds them.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: Chunks,
        watch: Watch,
        running: AsyncExitStack,
        held: AsyncExitStack,
        headers: Mapping[str, str],
        stall_s: float,
    ) -> None:
        super().__init__(self._events(), headers={"cache-control": "no-cache", **headers})
        self._chunks = chunks
        self._watch = watch
        self._running = running
        self._held = held
        self._stall_s = stall_s
        self._arrived: asyncio.Queue[Chunk | Exception | None] = asyncio.Queue()  # None: the end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(self._stall_s):
                    await send(message)
            except TimeoutError:
                _log.info("a stream was ended: its client read nothing for %g s", self._stall_s)
                raise ClientDisconnect from None

        async with self._held:
            taking = asyncio.create_task(self._take())
            try:
                await super().__call__(scope, receive, send_in_time)
            finally:
                taking.cancel()
                await asyncio.gather(taking, return_exceptions=True)

    async def _take(self) -> None:
        """Take the engine's chunks as they come, however slowly the client reads, then let its lane go."""
        end: Exception | None = None
        try:
            async with self._running:
                async for chunk in self._chunks:
                    self._arrived.put_nowait(chunk)
        except Exception as error:  # noqa: BLE001  the status is sent: an error can only be told as an event
            end = error
        self._arrived.put_nowait(end)

    async def _events(self) -> AsyncIterator[bytes]:
        while isinstance(item := await self._arrived.get(), dict):
            self._watch.chunk(item)
            yield _event(item)
        if item is None:
            self._watch.status = "200"
            yield b"data: [DONE]\n\n"
        else:
            failure = as_lanewise(item)
            self._watch.status = str(failure.status.value)
            yield _event(failure.body)


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
