"""`Client` and `AsyncClient` against a real server."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from lanewise.clients import AsyncClient, Client, ConnectionFailed, ServerRefused, digest_of
from lanewise.loaders import digest_of as digest_of_stored


@pytest.fixture
def nobody_listens() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def test_a_versions_life(served: Any, adapter_folders: dict[str, Path]) -> None:
    client = served.client
    first = client.push_folder("life", adapter_folders["a0"])
    assert (first.model, first.state) == ("life@1", "stored")
    assert client.adapter("life").active is None
    second = client.push_folder("life", adapter_folders["a1"], activate=True)
    assert (second.model, second.state) == ("life@2", "active")
    assert [v.version for v in client.versions("life")] == [1, 2]
    assert client.activate("life", 1).state == "active"
    assert client.adapter("life").active == 1
    client.delete("life", 2)
    assert client.adapter("life").versions == (1,)
    client.delete("life")
    assert "life" not in [adapter.name for adapter in client.adapters()]


@pytest.mark.anyio
async def test_a_versions_life_async(served: Any, adapter_folders: dict[str, Path]) -> None:
    async with AsyncClient(served.url) as client:
        await client.wait_ready()
        pushed = await client.push_folder("async", adapter_folders["a0"])
        assert await client.versions("async") == [pushed]
        assert (await client.activate("async", 1)).state == "active"
        assert (await client.adapter("async")).active == 1
        await client.delete("async")
        assert "async" not in [adapter.name for adapter in await client.adapters()]
        with pytest.raises(ServerRefused, match="does not exist"):
            await client.adapter("async")


def test_both_sides_agree_on_the_digest(served: Any, adapter_folders: dict[str, Path]) -> None:
    folder = adapter_folders["a2"]
    file, config = (
        folder / "adapter_model.safetensors",
        json.loads((folder / "adapter_config.json").read_text()),
    )
    config["base_model_name_or_path"] = "an/ünusual/näme"
    ours = digest_of(config, file)
    assert ours == digest_of(config, file.read_bytes()) == digest_of_stored(config, file)
    assert served.client.push("digest", file, config).digest == ours
    served.client.delete("digest")


def test_refusals_carry_what_the_server_said(served: Any, adapter_config: dict[str, Any]) -> None:
    with pytest.raises(ServerRefused) as refused:
        served.client.push("argon", b"not safetensors", adapter_config)
    error = refused.value
    assert (error.status, error.type) == (422, "invalid_adapter_error")
    assert error.param == "adapter_model.safetensors"


def test_no_answer_is_connection_failed(nobody_listens: str) -> None:
    with Client(nobody_listens) as client:
        with pytest.raises(ConnectionFailed, match=nobody_listens):
            client.adapters()
        with pytest.raises(ConnectionFailed, match="not ready within"):
            client.wait_ready(within_s=0.2)


@pytest.mark.anyio
async def test_no_answer_is_connection_failed_async(nobody_listens: str) -> None:
    async with AsyncClient(nobody_listens) as client:
        with pytest.raises(ConnectionFailed, match=nobody_listens):
            await client.adapters()
        with pytest.raises(ConnectionFailed, match="not ready within"):
            await client.wait_ready(within_s=0.2)
