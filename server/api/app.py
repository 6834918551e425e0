"""The FastAPI app: routes, errors and the service's life."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI

from ..engines.protocol import Engine
from ..service import Service
from ..settings import Settings
from . import adapters, errors, openai, ops
from .middleware import Envelope


def create_app(engine: Engine, settings: Settings) -> FastAPI:
    """An app that serves `engine`; its lifespan opens the data folder and loads the base and active versions.

    Entering the lifespan raises Conflict (data folder in use), LoaderError or EngineFailure.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        service = Service(engine, settings)
        app.state.service = service
        try:
            await service.start()
            yield
        finally:
            await service.close()

    app = FastAPI(title="lanewise", version=version("lanewise"), lifespan=lifespan, redirect_slashes=False)
    app.add_middleware(Envelope)
    errors.install(app)
    for room in (openai, adapters, ops):
        app.include_router(room.router)
    return app
