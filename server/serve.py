"""Runs an engine's app under uvicorn until a signal says stop."""

import asyncio
import ipaddress
import logging
import os
import socket
from collections.abc import Callable, Generator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
import uvloop

from .api.app import create_app
from .engines.protocol import Engine
from .service import Service
from .settings import Settings

_LINGER_S = 5  # after the engine's grace: for the last bytes to reach their clients
_MAX_HEADERS = 2**20  # bytes; a push carries its config in one
_log = logging.getLogger(__name__)


def serve(engine: Engine, settings: Settings, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, then let streams finish within the grace. A second signal ends at once.

    `announce` is called once with the URL, when requests are taken. Raises OSError (address in use), and
    what starting raises: Conflict, LoaderError, EngineFailure.
    """
    if not _is_loopback(settings.host):
        _log.warning("listening on %s without keys: anyone who reaches it can push adapters", settings.host)
    _run(engine, settings, lambda server: announce(server.url))


@contextmanager
def serving(engine: Engine, settings: Settings) -> Generator[str]:
    """Serve from another thread while the block runs; yields the URL. Raises what `serve` raises."""
    ready: Future[_Server] = Future()
    with ThreadPoolExecutor(1, "lanewise-server") as executor:
        done = executor.submit(_run, engine, settings, ready.set_result)
        either: list[Future[Any]] = [ready, done]
        wait(either, return_when=FIRST_COMPLETED)
        if done.done():
            done.result()
        server = ready.result()
        try:
            yield server.url
        finally:
            server.should_exit = True
            done.result()


def _run(engine: Engine, settings: Settings, on_ready: "Callable[[_Server], None]") -> None:
    with _bound_socket(settings.host, settings.port) as listener:
        uvloop.run(_serve(engine, settings, listener, on_ready))


async def _serve(
    engine: Engine, settings: Settings, listener: socket.socket, on_ready: "Callable[[_Server], None]"
) -> None:
    app = create_app(engine, settings)
    config = uvicorn.Config(
        app,
        lifespan="off",  # entered below, so that what starting raises is raised here
        log_config=None,
        access_log=False,
        http="h11",  # httptools takes headers of any size
        h11_max_incomplete_event_size=_MAX_HEADERS,
        timeout_graceful_shutdown=int(settings.grace_s) + _LINGER_S,
    )
    async with app.router.lifespan_context(app):
        await _Server(config, app.state.service, on_ready).serve(sockets=[listener])


class _Server(uvicorn.Server):
    """uvicorn with our way of stopping: streams end by the engine's grace, not by a cancelled task."""

    def __init__(
        self, config: uvicorn.Config, service: Service, on_ready: "Callable[[_Server], None]"
    ) -> None:
        super().__init__(config)
        self._service = service
        self._on_ready = on_ready
        self.url = ""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets, "the server is given the socket it listens on"
        host, port = sockets[0].getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._on_ready(self)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        draining = asyncio.create_task(self._service.drain())
        await super().shutdown(sockets)
        await draining

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)  # nothing to save: what was acknowledged is on disk
        grace = self._service.settings.grace_s
        _log.info("stopping; running requests have %g s, a second signal ends at once", grace)
        self.should_exit = True


def _bound_socket(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}; see --host") from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
