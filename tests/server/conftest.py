"""A small base's inventory, adapters that fit it, and real servers with a scripted engine behind them."""

import json
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save

from lanewise.loaders import Inventory
from lanewise.server.engines.fake import FakeEngine
from lanewise.server.engines.protocol import Call
from lanewise.server.serve import serving
from lanewise.server.settings import Settings

_CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 4,
    "vocab_size": 320,
    "max_position_embeddings": 512,
}
_Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"


@dataclass(frozen=True)
class Factors:
    """A push: tensors and config. `variant` makes the bytes, and so the digest, differ."""

    rank: int = 2
    variant: int = 0
    changes: dict[str, Any] = field(default_factory=dict[str, Any])  # of the config
    tensors: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])  # instead of the usual

    @property
    def config(self) -> dict[str, Any]:
        usual = {"peft_type": "LORA", "r": self.rank, "lora_alpha": 4, "target_modules": ["q_proj"]}
        return usual | self.changes

    @property
    def body(self) -> bytes:
        a = torch.full((self.rank, 128), 0.5 + self.variant)
        b = torch.full((256, self.rank), 0.25)
        usual = {f"{_Q_PROJ}.lora_A.weight": a, f"{_Q_PROJ}.lora_B.weight": b}
        return save(self.tensors or usual)

    @property
    def headers(self) -> dict[str, str]:
        return {"x-lanewise-config": json.dumps(self.config)}


def script(call: Call) -> list[str]:
    """Twelve tokens that name the version which says them."""
    return [f"{call.lane.key if call.lane else 'base'}:{i} " for i in range(12)]


@dataclass
class Running:
    """A server that runs: its engine to look into, and a client of its HTTP API."""

    url: str
    engine: FakeEngine
    http: httpx.Client
    data: Path

    def push(self, name: str, factors: Factors, *, activate: bool = True, **headers: str) -> httpx.Response:
        return self.http.post(
            f"/v1/adapters/{name}/versions",
            params={"activate": activate},
            content=factors.body,
            headers=factors.headers | headers,
        )

    def ask(self, model: str, **more: Any) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], **more}
        return self.http.post("/v1/chat/completions", json=body)

    def said(self, model: str) -> str:
        response = self.ask(model)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]["content"]


Start = Callable[..., AbstractContextManager[Running]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def base_config() -> dict[str, Any]:
    """The `config.json` of a small base; nothing more of it is needed."""
    return _CONFIG


@pytest.fixture(scope="session")
def inventory(base_config: dict[str, Any]) -> Inventory:
    return Inventory.from_config(base_config)


@pytest.fixture
def factors() -> type[Factors]:
    """Makes pushes that fit the inventory, unless told otherwise."""
    return Factors


@pytest.fixture
def said_by() -> Callable[[str], str]:
    """The whole answer that a lane's script gives."""
    return lambda key: "".join(f"{key}:{i} " for i in range(12))


@pytest.fixture
def make_engine(inventory: Inventory) -> Callable[..., FakeEngine]:
    return partial(FakeEngine, inventory, script)


@pytest.fixture
def start(tmp_path: Path, make_engine: Callable[..., FakeEngine]) -> Start:
    """Starts a server on a free port: `start(max_json_bytes=…, engine={"max_lanes": 2})`."""

    @contextmanager
    def started(engine: dict[str, Any] | None = None, **settings: Any) -> Generator[Running]:
        fake = make_engine(**(engine or {}))
        data = tmp_path / "data"
        chosen: dict[str, Any] = {
            "base": tmp_path,
            "base_name": "tiny",
            "data": data,
            "port": 0,
            "grace_s": 5,
        } | settings
        with serving(fake, Settings(**chosen)) as url, httpx.Client(base_url=url, timeout=10) as http:
            yield Running(url, fake, http, data)

    return started


@pytest.fixture
def server(start: Start) -> Iterator[Running]:
    with start() as running:
        yield running
