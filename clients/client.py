"""Clients of a lanewise server, sync and async, for what the `openai` SDK lacks: adapters and versions.

Both share the requests they make and how they read replies; only the waiting differs.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from .errors import ConnectionFailed, ServerRefused

Factors = bytes | Path
"""A safetensors file: its bytes, or where it lies."""

_CHUNK = 1 << 20  # bytes of a file held at once
_POLL_S = 0.05


@dataclass(frozen=True)
class Version:
    """One immutable version as the server describes it. `created` is in Unix seconds, `nbytes` in bytes."""

    adapter: str
    version: int
    digest: str
    state: str
    created: int
    rank: int
    layout: str
    nbytes: int
    leases: int

    @property
    def model(self) -> str:
        """What to name as `model` to be answered by exactly this version."""
        return f"{self.adapter}@{self.version}"


@dataclass(frozen=True)
class Adapter:
    """An adapter: the numbers of its stored versions, and which of them is active."""

    name: str
    active: int | None
    versions: tuple[int, ...]
    created: int


def digest_of(config: Mapping[str, Any], factors: Factors) -> str:
    """The version's digest: sha256 over the config's canonical JSON, a newline and the safetensors bytes."""
    digest = hashlib.sha256(_canonical(config) + b"\n")
    for chunk in _chunks(factors):
        digest.update(chunk)
    return digest.hexdigest()


class Client:
    """Talks to one server and waits for it. Raises ServerRefused or ConnectionFailed.

    `url` is the server's root, without `/v1`. Use as a context manager, or call `close`.
    """

    def __init__(self, url: str, *, timeout_s: float = 60) -> None:
        self.url = url.rstrip("/")
        self._http = httpx.Client(base_url=self.url, timeout=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def wait_ready(self, within_s: float = 60) -> None:
        """Return once the server takes requests. Raises ConnectionFailed when it does not in time."""
        deadline = time.monotonic() + within_s
        while not self._is_ready():
            _check_deadline(deadline, f"{self.url} was not ready within {within_s:g} s")
            time.sleep(_POLL_S)

    def adapters(self) -> list[Adapter]:
        return [_adapter(item) for item in self._call("GET", "/v1/adapters")["data"]]

    def adapter(self, name: str) -> Adapter:
        return _adapter(self._call("GET", _path(name)))

    def versions(self, name: str) -> list[Version]:
        return [Version(**_known(item)) for item in self._call("GET", _path(name, "versions"))["data"]]

    def push(
        self, name: str, factors: Factors, config: Mapping[str, Any], *, activate: bool = False
    ) -> Version:
        """Store the next version of an adapter and, if asked, activate it. The server checks the digest."""
        # From a file the body goes chunk by chunk: memory stays flat.
        reply = self._call(
            "POST",
            _path(name, "versions"),
            params={"activate": str(activate).lower()},
            headers=_push_headers(factors, config),
            content=factors if isinstance(factors, bytes) else _chunks(factors),
        )
        return Version(**_known(reply))

    def push_folder(self, name: str, folder: Path, *, activate: bool = False) -> Version:
        """Push `adapter_model.safetensors` and `adapter_config.json` of a folder."""
        return self.push(name, *_of_folder(folder), activate=activate)

    def activate(self, name: str, version: int) -> Version:
        """Make a stored version the one that the adapter's name stands for."""
        return Version(**_known(self._call("POST", _path(name, "versions", str(version), "activate"))))

    def delete(self, name: str, version: int | None = None) -> None:
        """Delete an adapter, or one version of it. New requests are refused at once; running ones finish."""
        self._call("DELETE", _path(name) if version is None else _path(name, "versions", str(version)))

    def _is_ready(self) -> bool:
        try:
            return self._http.get("/ready").is_success
        except httpx.TransportError:
            return False

    def _call(self, method: str, path: str, **more: Any) -> Any:
        with _transport_errors(self.url):
            return _read(self._http.request(method, path, **more))


class AsyncClient:
    """`Client` for asyncio."""

    def __init__(self, url: str, *, timeout_s: float = 60) -> None:
        self.url = url.rstrip("/")
        self._http = httpx.AsyncClient(base_url=self.url, timeout=timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def wait_ready(self, within_s: float = 60) -> None:
        """Return once the server takes requests. Raises ConnectionFailed when it does not in time."""
        deadline = time.monotonic() + within_s
        while not await self._is_ready():
            _check_deadline(deadline, f"{self.url} was not ready within {within_s:g} s")
            await asyncio.sleep(_POLL_S)

    async def adapters(self) -> list[Adapter]:
        return [_adapter(item) for item in (await self._call("GET", "/v1/adapters"))["data"]]

    async def adapter(self, name: str) -> Adapter:
        return _adapter(await self._call("GET", _path(name)))

    async def versions(self, name: str) -> list[Version]:
        reply = await self._call("GET", _path(name, "versions"))
        return [Version(**_known(item)) for item in reply["data"]]

    async def push(
        self, name: str, factors: Factors, config: Mapping[str, Any], *, activate: bool = False
    ) -> Version:
        """Store the next version of an adapter and, if asked, activate it. The server checks the digest."""
        headers = await asyncio.to_thread(_push_headers, factors, config)
        reply = await self._call(
            "POST",
            _path(name, "versions"),
            params={"activate": str(activate).lower()},
            headers=headers,
            content=factors if isinstance(factors, bytes) else _chunks_async(factors),
        )
        return Version(**_known(reply))

    async def push_folder(self, name: str, folder: Path, *, activate: bool = False) -> Version:
        """Push `adapter_model.safetensors` and `adapter_config.json` of a folder."""
        return await self.push(name, *_of_folder(folder), activate=activate)

    async def activate(self, name: str, version: int) -> Version:
        """Make a stored version the one that the adapter's name stands for."""
        reply = await self._call("POST", _path(name, "versions", str(version), "activate"))
        return Version(**_known(reply))

    async def delete(self, name: str, version: int | None = None) -> None:
        """Delete an adapter, or one version of it. New requests are refused at once; running ones finish."""
        await self._call("DELETE", _path(name) if version is None else _path(name, "versions", str(version)))

    async def _is_ready(self) -> bool:
        try:
            return (await self._http.get("/ready")).is_success
        except httpx.TransportError:
            return False

    async def _call(self, method: str, path: str, **more: Any) -> Any:
        with _transport_errors(self.url):
            return _read(await self._http.request(method, path, **more))


def _path(*parts: str) -> str:
    return "/".join(["/v1/adapters", *(quote(part, safe="") for part in parts)])


def _push_headers(factors: Factors, config: Mapping[str, Any]) -> dict[str, str]:
    size = len(factors) if isinstance(factors, bytes) else factors.stat().st_size
    return {
        "content-type": "application/octet-stream",
        "content-length": str(size),
        "x-lanewise-config": json.dumps(config),  # ASCII: headers hold nothing else
        "x-lanewise-digest": digest_of(config, factors),
    }


def _canonical(config: Mapping[str, Any]) -> bytes:
    return json.dumps(config, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _of_folder(folder: Path) -> tuple[Path, dict[str, Any]]:
    config = json.loads((folder / "adapter_config.json").read_bytes())
    return folder / "adapter_model.safetensors", config


def _chunks(factors: Factors) -> Iterator[bytes]:
    if isinstance(factors, bytes):
        yield factors
        return
    with factors.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


async def _chunks_async(factors: Path) -> AsyncIterator[bytes]:
    chunks = _chunks(factors)
    while chunk := await asyncio.to_thread(next, chunks, b""):
        yield chunk


def _adapter(item: Mapping[str, Any]) -> Adapter:
    return Adapter(item["name"], item["active"], tuple(item["versions"]), item["created"])


def _known(item: Mapping[str, Any]) -> dict[str, Any]:
    """The fields this client knows; a newer server may send more."""
    return {name: item[name] for name in Version.__dataclass_fields__}


def _check_deadline(deadline: float, message: str) -> None:
    if time.monotonic() > deadline:
        raise ConnectionFailed(message)


@contextmanager
def _transport_errors(url: str) -> Generator[None]:
    try:
        yield
    except httpx.TransportError as error:
        raise ConnectionFailed(f"{url}: {error or type(error).__name__}") from error


def _read(response: httpx.Response) -> Any:
    """The reply's JSON. Raises ServerRefused for an error status."""
    if response.is_success:
        return response.json()
    try:
        error = response.json()["error"]
        fields = {name: error.get(name) for name in ("type", "param", "code")}
        raise ServerRefused(
            response.status_code, error["message"], **fields, details=error.get("details", ())
        )
    except (ValueError, KeyError, TypeError):  # not lanewise's error object: a proxy's, perhaps
        raise ServerRefused(response.status_code, response.text[:500]) from None
