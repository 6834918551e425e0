"""Our own routes: push, list, activate and delete adapters and their versions."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from pydantic import BeforeValidator
from starlette.requests import ClientDisconnect

from lanewise.loaders import AdapterConfig, AdapterDigest, LoaderError
from lanewise.loaders.config import parse_json_object

from ..catalog import FACTORS_FILE, AdapterRecord, Version, parse_number
from ..errors import InvalidRequest, LanewiseError, Unprocessable
from ..metrics import Metrics
from ..service import Service
from .bodies import receive_file
from .dependencies import UsedService
from .errors import as_lanewise
from .schemas import AdapterList, AdapterObject, Deleted, PushQuery, VersionList, VersionObject

CONFIG_HEADER = "x-lanewise-config"
DIGEST_HEADER = "x-lanewise-digest"


def _number(text: str) -> int:
    """One version, one URL: pydantic's own integers may be `+1`, `01` or `1.0`."""
    number = parse_number(text)
    if number is None:
        raise ValueError("expected a version number: digits, the first not 0")
    return number


Number = Annotated[int, BeforeValidator(_number)]
router = APIRouter(prefix="/v1/adapters", tags=["adapters"])


@router.get("")
async def list_adapters(service: UsedService) -> AdapterList:
    return AdapterList(data=[_adapter(record) for record in service.catalog.adapters.values()])


@router.get("/{name}")
async def get_adapter(name: str, service: UsedService) -> AdapterObject:
    return _adapter(service.catalog.adapter(name))


@router.delete("/{name}")
async def delete_adapter(name: str, service: UsedService) -> Deleted:
    """Refuse new requests for the adapter at once; those that run on it finish."""
    service.check_open()
    await service.delete(name)
    return Deleted(id=name, object="adapter")


@router.get("/{name}/versions")
async def list_versions(name: str, service: UsedService) -> VersionList:
    versions = service.catalog.adapter(name).versions.values()
    return VersionList(data=[_version(service, version) for version in versions])


@router.post(
    "/{name}/versions",
    status_code=201,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def push_version(
    name: str,
    request: Request,
    service: UsedService,
    query: Annotated[PushQuery, Query()],
    config: Annotated[str | None, Header(alias=CONFIG_HEADER)] = None,
    digest: Annotated[str | None, Header(alias=DIGEST_HEADER)] = None,
) -> VersionObject:
    """Store the next version of an adapter. The body is its safetensors file, the header its config.

    With `x-lanewise-digest` the bytes must have that digest: sha256 over the canonical JSON of the config
    (sorted keys, no spaces), a newline, and the file.
    """
    with _counted(service.metrics):
        async with service.receiving(name) as folder:
            parsed = _config(config)
            hashed = AdapterDigest(parsed)
            await receive_file(request, folder / FACTORS_FILE, hashed, service.settings.max_push_bytes)
            found = hashed.hexdigest()
            if digest is not None and digest.lower() != found:
                raise Unprocessable(
                    f"the bytes that arrived have digest {found}; expected {digest[:80]}; push again",
                    param=DIGEST_HEADER,
                    code="digest_mismatch",
                )
            version = await service.publish(name, folder, parsed, found, activate=query.activate)
    return _version(service, version)


@router.get("/{name}/versions/{number}")
async def get_version(name: str, number: Number, service: UsedService) -> VersionObject:
    return _version(service, service.catalog.version(name, number))


@router.post("/{name}/versions/{number}/activate")
async def activate_version(name: str, number: Number, service: UsedService) -> VersionObject:
    """Requests from now on run on this version; those that run already keep theirs."""
    service.check_open()
    return _version(service, await service.activate(name, number))


@router.delete("/{name}/versions/{number}")
async def delete_version(name: str, number: Number, service: UsedService) -> Deleted:
    service.check_open()
    version = await service.delete_version(name, number)
    return Deleted(id=version.key, object="adapter.version")


def _config(header: str | None) -> dict[str, Any]:
    if header is None:
        raise InvalidRequest(
            f"the header {CONFIG_HEADER} is missing; expected adapter_config.json as one line of JSON",
            param=CONFIG_HEADER,
        )
    raw = header.encode("latin-1")  # as the HTTP server decoded it
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"the header {CONFIG_HEADER} is not UTF-8: {error.reason} at byte {error.start}; expected JSON "
            "in UTF-8, or in ASCII with \\u escapes",
            param=CONFIG_HEADER,
        ) from None
    config = parse_json_object(raw, CONFIG_HEADER)
    AdapterConfig.parse(config)  # refuses before the factors are sent
    return config


@contextmanager
def _counted(metrics: Metrics) -> Generator[None]:
    started = time.monotonic()
    outcome = "stored"
    try:
        yield
    except ClientDisconnect:
        outcome = "client_gone"
        raise
    except (LanewiseError, LoaderError) as error:
        outcome = as_lanewise(error).code or "refused"
        raise
    except BaseException:
        outcome = "failed"
        raise
    finally:
        metrics.pushes.labels(outcome).inc()
        metrics.push_seconds.observe(time.monotonic() - started)


def _adapter(record: AdapterRecord) -> AdapterObject:
    return AdapterObject(
        name=record.name,
        active=record.active_number,
        versions=list(record.versions),
        created=record.created,
    )


def _version(service: Service, version: Version) -> VersionObject:
    return VersionObject(
        adapter=version.adapter,
        version=version.number,
        digest=version.digest,
        state=service.state(version),
        created=version.created,
        rank=version.rank,
        layout=version.layout,
        nbytes=version.nbytes,
        leases=service.lanes.leases(version),
    )
