"""OpenAI's routes: chat completions, completions, models."""

import uuid
from contextlib import AsyncExitStack

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from ..catalog import BASE, Version
from ..engines.protocol import Call, Lane
from ..errors import LanewiseError
from ..selection import select
from ..service import Service
from .bodies import described, read_json
from .dependencies import UsedService
from .schemas import ChatRequest, CompletionRequest, ModelCard, ModelList, Provenance
from .streams import EventStream, unless_gone

router = APIRouter(prefix="/v1", tags=["openai"])


@router.post("/chat/completions", openapi_extra=described(ChatRequest))
async def chat_completions(request: Request, service: UsedService) -> Response:
    return await _answer(request, service, ChatRequest, "chat.completions")


@router.post("/completions", openapi_extra=described(CompletionRequest))
async def completions(request: Request, service: UsedService) -> Response:
    return await _answer(request, service, CompletionRequest, "completions")


@router.get("/models", response_model_exclude_none=True)
async def models(service: UsedService) -> ModelList:
    active = [record.active for record in service.catalog.adapters.values()]
    cards = [_card(service, version.adapter, version) for version in active if version]
    return ModelList(data=[_base_card(service), *cards])


@router.get("/models/{model_id:path}", response_model_exclude_none=True)
async def model(model_id: str, service: UsedService) -> ModelCard:
    version = select(service.catalog, model_id)
    return _base_card(service) if version is None else _card(service, model_id, version)


async def _answer(
    request: Request, service: Service, kind: type[ChatRequest] | type[CompletionRequest], route: str
) -> Response:
    """Read, select, lease, call the engine. A stream keeps the lease until the engine has ended."""
    async with AsyncExitStack() as held:
        watch = held.enter_context(service.metrics.request(route))
        running = await held.enter_async_context(AsyncExitStack())
        try:
            service.check_open()
            body = await read_json(request, kind, service.settings.max_json_bytes)
            version = select(service.catalog, body.model, body.lora_path)
            watch.adapter = service.metrics.adapter_label(version.adapter if version else BASE)
            lane = await running.enter_async_context(service.lanes.lease(version)) if version else None
            call = Call(uuid.uuid4().hex, body, lane)
            headers = _provenance_headers(lane)
            if body.stream:
                chunks = await service.engine.stream(call)
                running.push_async_callback(chunks.aclose)
                stall_s = service.settings.client_stall_s
                return EventStream(chunks, watch, running, held.pop_all(), headers, stall_s)
            answer = await unless_gone(request, service.engine.complete(call))
        except LanewiseError as error:
            watch.status = str(error.status.value)
            raise
        watch.chunk(answer)
        watch.status = "200"
        return JSONResponse(answer, headers=headers)


def _provenance_headers(lane: Lane | None) -> dict[str, str]:
    if lane is None:
        return {"x-lanewise-adapter": BASE}
    return {
        "x-lanewise-adapter": lane.adapter,
        "x-lanewise-version": str(lane.version),
        "x-lanewise-digest": lane.digest,
    }


def _base_card(service: Service) -> ModelCard:
    name = service.settings.served_base_name
    return ModelCard(id=name, created=service.started_at, root=name)


def _card(service: Service, name: str, version: Version) -> ModelCard:
    return ModelCard(
        id=name,
        created=version.created,
        root=version.key,
        parent=service.settings.served_base_name,
        lanewise=Provenance(version=version.number, digest=version.digest),
    )
