"""Around every request: its id, and an answer when nobody else has one."""

import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import as_lanewise, json_response

REQUEST_ID = "x-request-id"
_SANE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_log = logging.getLogger(__name__)


class Envelope:
    """Names each request by the client's `x-request-id`, if it is sane, and turns unexpected errors into 500.

    Once an answer has begun, an error can only cut the connection; that is left to the HTTP server.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        asked = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = asked if _SANE.fullmatch(asked) else uuid.uuid4().hex
        started = False

        async def named_send(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        try:
            await self.app(scope, receive, named_send)
        except ClientDisconnect:
            _log.info("request %s: the client went away", request_id)
        except Exception as error:  # the last resort: logged, and a 500 without internals
            _log.error("request %s failed: %s %s", request_id, scope["method"], scope["path"])
            if started:
                raise
            await json_response(as_lanewise(error))(scope, receive, named_send)
