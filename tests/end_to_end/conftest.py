"""A real `lanewise serve` process on a tiny base, and random adapters that change what it says."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from lanewise.clients import Client
from lanewise.loaders import BaseCheckpoint, Inventory, write_adapter
from lanewise.server.tiny_base import write_tiny_base

RANK = 4
ADAPTERS = 7
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": RANK,
    "lora_alpha": 2 * RANK,
    "target_modules": ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"],
    "_sglang_lora_format": "shared_outer",
}


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("base") / "tiny-moe")


@pytest.fixture(scope="session")
def inventory(base_folder: Path) -> Inventory:
    return BaseCheckpoint.open(base_folder).inventory


@pytest.fixture(scope="session")
def adapter_config() -> dict[str, Any]:
    return CONFIG


@pytest.fixture(scope="session")
def random_factors(inventory: Inventory) -> Callable[[int], dict[str, Tensor]]:
    """seed → factors for q, v and all experts, large enough to change every answer."""

    def make(seed: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(seed)
        factors: dict[str, Tensor] = {}
        for module in inventory.modules.values():
            name = f"base_model.model.{module.name}"
            if module.experts is None:
                if not module.name.endswith(("q_proj", "v_proj")):
                    continue
                a, b = (RANK, module.in_features), (module.out_features, RANK)
            else:
                shared_a = not module.name.endswith("w2")
                a = (1 if shared_a else module.experts, RANK, module.in_features)
                b = (module.experts if shared_a else 1, module.out_features, RANK)
            factors[f"{name}.lora_A.weight"] = (torch.randn(a, generator=random) * 0.15).bfloat16()
            factors[f"{name}.lora_B.weight"] = (torch.randn(b, generator=random) * 0.15).bfloat16()
        return factors

    return make


@pytest.fixture(scope="session")
def adapter_folders(
    tmp_path_factory: pytest.TempPathFactory, random_factors: Callable[[int], dict[str, Tensor]]
) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("adapters")
    folders = {f"a{i}": home / f"a{i}" for i in range(ADAPTERS)}
    for seed, folder in enumerate(folders.values()):
        write_adapter(folder, random_factors(seed), CONFIG)
    return folders


@dataclass(frozen=True)
class Served:
    """A server process: where it listens, the process, and clients of it."""

    url: str
    process: subprocess.Popen[str]
    client: Client
    http: httpx.Client

    def ask(self, model: str, **more: Any) -> httpx.Response:
        usual = {"temperature": 0, "max_tokens": 24}
        body = {"model": model, "messages": [{"role": "user", "content": "Who are you?"}]}
        return self.http.post("/v1/chat/completions", json=body | usual | more)

    def said(self, model: str) -> str:
        response = self.ask(model)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]["content"]


Serve = Callable[..., AbstractContextManager[Served]]


@pytest.fixture(scope="session")
def serve(base_folder: Path) -> Serve:
    """`with serve(data, adapters, **options) as served`: a server process, ready, ended in order."""

    @contextmanager
    def run(data: Path, adapters: dict[str, Path] | None = None, **options: object) -> Generator[Served]:
        arguments = [f"--adapter={name}={folder}" for name, folder in (adapters or {}).items()]
        given: dict[str, object] = {"base": base_folder, "data": data, "port": 0, "grace_s": 5} | options
        arguments += [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
        process = subprocess.Popen(
            [sys.executable, "-m", "lanewise.server", "serve", *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip().rpartition(" ")[2]
            assert url, "the server did not start"
            with Client(url) as client, httpx.Client(base_url=url, timeout=60) as http:
                yield Served(url, process, client, http)
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=30)

    return run


@pytest.fixture(scope="module")
def served(
    serve: Serve, adapter_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Generator[Served]:
    """One server for a module's tests, with every adapter stored and active as version 1."""
    with serve(tmp_path_factory.mktemp("data"), adapter_folders, max_rank=8) as running:
        yield running
