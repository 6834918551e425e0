"""A tiny base, eight random adapters, and engines that run them."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lanewise.loaders import Adapter, BaseCheckpoint, Inventory, read_adapter, write_adapter
from lanewise.server.api.schemas import ChatRequest, CompletionRequest
from lanewise.server.engines import Call, Chunk, Engine, Lane
from lanewise.server.engines.torch_engine import TorchEngine
from lanewise.server.tiny_base import Architecture, write_tiny_base

RANK = 4
LANES = 8


@dataclass(frozen=True)
class Resident:
    """An adapter on disk and the lane it is loaded as."""

    lane: Lane
    adapter: Adapter


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Architecture], Path]:
    """architecture → the folder of a tiny base of it."""

    @cache
    def write(architecture: Architecture) -> Path:
        return write_tiny_base(tmp_path_factory.mktemp(architecture), architecture)

    return write


@pytest.fixture(scope="session")
def architecture(request: pytest.FixtureRequest) -> Architecture:
    """qwen3_moe, unless a test is parametrized over others (`indirect=True`)."""
    return getattr(request, "param", "qwen3_moe")


@pytest.fixture(scope="session")
def base_folder(tiny_base: Callable[[Architecture], Path], architecture: Architecture) -> Path:
    return tiny_base(architecture)


@pytest.fixture(scope="session")
def inventory(base_folder: Path) -> Inventory:
    return BaseCheckpoint.open(base_folder).inventory


@pytest.fixture(scope="session")
def tokenizer(base_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(base_folder)


@pytest.fixture(scope="session")
def make_resident(
    tmp_path_factory: pytest.TempPathFactory, inventory: Inventory
) -> Callable[[str, int, float], Resident]:
    """(name, seed, size of the factors) → an adapter of every module, written and read back."""

    def make(name: str, seed: int, size: float) -> Resident:
        folder = tmp_path_factory.mktemp("adapters") / name
        config = {
            "peft_type": "LORA",
            "r": RANK,
            "lora_alpha": 2 * RANK,
            "target_modules": sorted({_peft_name(module) for module in inventory.modules}),
            "_sglang_lora_format": "shared_outer",
        }
        write_adapter(folder, _random_factors(inventory, seed, size), config)
        adapter = read_adapter(folder, inventory, max_rank=64)
        return Resident(Lane(name, 1, adapter.digest), adapter)

    return make


@pytest.fixture(scope="session")
def residents(make_resident: Callable[[str, int, float], Resident]) -> list[Resident]:
    return [make_resident(f"adapter-{i}", i, 0.15) for i in range(LANES)]


StartEngine = Callable[..., AbstractAsyncContextManager[TorchEngine]]


@pytest.fixture
def start_engine(base_folder: Path, residents: list[Resident]) -> StartEngine:
    """`async with start_engine(lanes=8, **options) as engine`: started, lanes loaded, stopped at the end."""

    @asynccontextmanager
    async def start(lanes: int = 0, **options: Any) -> AsyncGenerator[TorchEngine]:
        engine = TorchEngine(base_folder, max_rank=RANK, **options)
        await engine.start()
        try:
            for resident in residents[:lanes]:
                await engine.load(resident.lane, resident.adapter)
            yield engine
        finally:
            await engine.stop(0)

    return start


MakeCall = Callable[..., Call]


@pytest.fixture(scope="session")
def completion() -> MakeCall:
    """(prompt, lane, **fields) → a greedy text completion; a seed or temperature makes it random."""

    def make(prompt: Any = "abc", lane: Lane | None = None, call_id: str = "1", **fields: Any) -> Call:
        defaults: dict[str, Any] = {"model": "m", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
        return Call(call_id, CompletionRequest(prompt=prompt, **(defaults | fields)), lane)

    return make


@pytest.fixture(scope="session")
def chat() -> MakeCall:
    """(text, lane, **fields) → a greedy chat request."""

    def make(text: Any = "hello", lane: Lane | None = None, call_id: str = "1", **fields: Any) -> Call:
        defaults: dict[str, Any] = {"model": "m", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
        body = ChatRequest.model_validate(
            {"messages": [{"role": "user", "content": text}]} | defaults | fields
        )
        return Call(call_id, body, lane)

    return make


@pytest.fixture(scope="session")
def read_stream() -> Callable[[Engine, Call], Awaitable[list[Chunk]]]:
    async def read(engine: Engine, call: Call) -> list[Chunk]:
        chunks = await engine.stream(call)
        try:
            return [chunk async for chunk in chunks]
        finally:
            await chunks.aclose()

    return read


def _random_factors(inventory: Inventory, seed: int, size: float) -> dict[str, Tensor]:
    """Factors of every module, in SGLang's names and the shared_outer layout."""
    random = torch.Generator().manual_seed(seed)

    def factor(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=random) * size).to(torch.bfloat16)

    factors: dict[str, Tensor] = {}
    for name, module in inventory.modules.items():
        prefix = f"base_model.model.{name}"
        if module.experts is None:
            a, b = factor(RANK, module.in_features), factor(module.out_features, RANK)
        else:
            shared_a = not name.endswith("w2")
            a = factor(1 if shared_a else module.experts, RANK, module.in_features)
            b = factor(module.experts if shared_a else 1, module.out_features, RANK)
        factors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
    return factors


def _peft_name(module: str) -> str:
    leaf = module.rpartition(".")[2]
    return {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.get(leaf, leaf)
