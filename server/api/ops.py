"""Routes for whoever runs the server: is it alive, does it take requests, what does it do."""

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from ..errors import EngineFailure, Unavailable
from .dependencies import UsedService

router = APIRouter(tags=["ops"])


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(service: UsedService) -> dict[str, str]:
    """200 while the engine works; when it does not, the process should be started anew."""
    if not service.engine.healthy:
        raise EngineFailure("the engine is not healthy; restart the server", code="unhealthy")
    return {"status": "ok"}


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def ready(service: UsedService) -> dict[str, str]:
    """200 while new requests are taken."""
    service.check_open()
    if not service.engine.healthy:
        raise Unavailable("the engine is not healthy", code="unhealthy")
    return {"status": "ready"}


@router.get("/metrics")
async def metrics(service: UsedService) -> Response:
    return Response(service.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)
