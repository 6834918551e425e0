"""Push, swap and ask against a real server and the real engine: nothing lost, mixed or mislabelled."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from openai import AsyncOpenAI
from safetensors.torch import save
from torch import Tensor

from lanewise.clients import AsyncClient, ServerRefused
from lanewise.clients.trainer import WeightPublisher

MIB = 2**20
RandomFactors = Callable[[int], dict[str, Tensor]]


async def stream(openai: AsyncOpenAI, model: str, tokens: int) -> tuple[str, dict[str, Any]]:
    """What a greedy stream says, and the provenance of its last chunk."""
    said, last = "", None
    chunks = await openai.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Who are you?"}],
        temperature=0,
        max_tokens=tokens,
        stream=True,
    )
    async for chunk in chunks:
        said += chunk.choices[0].delta.content or ""
        last = chunk
    assert last is not None
    assert last.choices[0].finish_reason in ("stop", "length")
    return said, (last.model_extra or {})["lanewise"]


@pytest.mark.anyio
async def test_streams_are_untouched_while_other_versions_are_pushed(
    served: Any, random_factors: RandomFactors, adapter_config: dict[str, Any]
) -> None:
    """16 streams on seven adapters and the base say what they say alone; `moving` is swapped 24 times."""
    tokens, swaps = 96, 24
    models = [*(f"a{i}" for i in range(7)), "base"]
    async with (
        AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as openai,
        AsyncClient(served.url) as client,
    ):
        alone = {model: (await stream(openai, model, tokens))[0] for model in models}
        assert len(set(alone.values())) == len(models), "every model says something else"
        pushes = [random_factors(100 + i) for i in range(4)]
        pushing, finished, versions = True, Counter[str](), list[int]()
        moving: list[tuple[str, dict[str, Any]]] = []

        async def keep_streaming(model: str) -> None:
            while pushing:
                said, provenance = await stream(openai, model, tokens)
                assert said == alone[model]
                assert provenance["adapter"] == model
                finished[model] += 1

        async def ask_moving() -> None:
            while pushing:
                moving.append(await stream(openai, "moving", 8))

        async def push() -> None:
            nonlocal pushing
            try:
                for factors in itertools.islice(itertools.cycle(pushes), swaps):
                    pushed = await client.push("moving", save(factors), adapter_config, activate=True)
                    versions.append(pushed.version)
            finally:
                pushing = False

        await client.push("moving", save(pushes[-1]), adapter_config, activate=True)
        await asyncio.gather(push(), ask_moving(), *(keep_streaming(model) for model in models * 2))
        assert versions == list(range(2, swaps + 2))
        assert all(finished[model] >= 2 for model in models)
        # Every answer of the moving adapter is the known answer of the version it names.
        known = {v: (await stream(openai, f"moving@{v}", 8))[0] for v in range(1, 5)}
        assert len(set(known.values())) == 4
        assert moving
        for said, provenance in moving:
            assert said == known[_same_bytes(provenance["version"])]
        await client.delete("moving")


def _same_bytes(version: int) -> int:
    """The first version with the same factors: four sets come round, and version 1 had the last of them."""
    return (version - 1) % 4 + 1


def test_a_mixed_batch_says_what_each_says_alone(served: Any) -> None:
    models = [*(f"a{i}" for i in range(7)), "base", "a0@1"]
    alone = {model: served.said(model) for model in models}
    with ThreadPoolExecutor(len(models)) as pool:
        for _ in range(3):
            assert dict(zip(models, pool.map(served.said, models), strict=True)) == alone


def _truncated(factors: dict[str, Tensor]) -> bytes:
    return save(factors)[:-100]


def _nan(factors: dict[str, Tensor]) -> bytes:
    name = "base_model.model.model.layers.1.mlp.experts.w1.lora_B.weight"
    return save(factors | {name: torch.full_like(factors[name], float("nan"))})


def _misshapen(factors: dict[str, Tensor]) -> bytes:
    name = "base_model.model.model.layers.1.mlp.experts.w1.lora_B.weight"
    return save(factors | {name: factors[name][:, :-1].contiguous()})


def _over_rank(factors: dict[str, Tensor]) -> bytes:
    return save({name: _wider(name, factor) for name, factor in factors.items()})


def _over_rank_as_declared(factors: dict[str, Tensor]) -> bytes:
    return _over_rank(factors)


def _wider(name: str, factor: Tensor) -> Tensor:
    return factor.repeat_interleave(4, -2 if "lora_A" in name else -1)  # rank 16; the server takes 8


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", ["nobody", "a0@99", "base:nobody"])
def test_unknown_is_404(served: Any, model: str, stream: bool) -> None:
    response = served.ask(model, stream=stream)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("spoil", "status", "named"),
    [
        (_truncated, 422, "truncated"),
        (_nan, 422, "model.layers.1.mlp.experts.w1.lora_B.weight"),
        (_misshapen, 422, "model.layers.1.mlp.experts.w1.lora_B.weight"),
        (_over_rank, 422, "lora_A.weight"),
        (_over_rank_as_declared, 422, "r: is 16; expected at most 8"),
    ],
)
def test_a_bad_push_changes_nothing(
    served: Any,
    random_factors: RandomFactors,
    adapter_config: dict[str, Any],
    spoil: Callable[[dict[str, Tensor]], bytes],
    status: int,
    named: str,
) -> None:
    before, listed = served.said("a1"), served.client.versions("a1")
    config = adapter_config | ({"r": 16} if spoil is _over_rank_as_declared else {})
    with pytest.raises(ServerRefused) as refused:
        served.client.push("a1", spoil(random_factors(1)), config, activate=True)
    assert refused.value.status == status
    assert named in refused.value.message
    assert served.said("a1") == before
    assert served.client.versions("a1") == listed


def test_publisher_pushes_a_trainers_tensors(
    served: Any, random_factors: RandomFactors, adapter_config: dict[str, Any]
) -> None:
    publisher = WeightPublisher(served.client, "published", adapter_config)
    first = publisher.publish(random_factors(0))
    assert first.model == "published@1"
    assert first.state == "active"
    assert served.said("published") == served.said("a0")
    second = publisher.publish(random_factors(1), activate=False)
    assert second.state == "stored"
    assert served.said("published") == served.said("a0")
    assert served.said("published@2") == served.said("a1")
    served.client.delete("published")


def test_versions_and_answers_survive_kill_9(
    serve: Any, random_factors: RandomFactors, adapter_config: dict[str, Any], tmp_path: Path
) -> None:
    with serve(tmp_path / "data") as first:
        for seed in (0, 1):
            pushed = first.client.push("argon", save(random_factors(seed)), adapter_config, activate=True)
        said = {model: first.said(model) for model in ("argon", "argon@1", "argon@2")}
        first.process.kill()
        first.process.wait()
    with serve(tmp_path / "data") as second:
        assert second.client.adapter("argon").active == 2
        assert second.client.versions("argon")[1].digest == pushed.digest
        assert {model: second.said(model) for model in said} == said


def test_a_stored_version_damaged_on_disk_is_not_served(
    serve: Any, random_factors: RandomFactors, adapter_config: dict[str, Any], tmp_path: Path
) -> None:
    """A flipped bit leaves finite numbers of the right shape; only the digest tells."""
    with serve(tmp_path / "data") as first:
        first.client.push("argon", save(random_factors(0)), adapter_config, activate=True)
    file = next((tmp_path / "data").rglob("adapter_model.safetensors"))
    spoiled = bytearray(file.read_bytes())
    spoiled[-2] ^= 1
    file.write_bytes(bytes(spoiled))
    with serve(tmp_path / "data") as second:
        response = second.ask("argon")
        assert response.status_code >= 400
        assert "digest" in response.json()["error"]["message"]
        assert second.ask("base").status_code == 200


@pytest.mark.slow
def test_a_thousand_requests_and_two_hundred_pushes_leave_no_trace(
    serve: Any, random_factors: RandomFactors, adapter_config: dict[str, Any], tmp_path: Path
) -> None:
    bodies = [save(random_factors(seed)) for seed in range(4)]
    with serve(tmp_path / "data", max_lanes=3, max_rank=8) as served, ThreadPoolExecutor(8) as pool:
        process = psutil.Process(served.process.pid)

        def push(number: int) -> None:
            served.client.push(f"b{number % 4}", bodies[number % 4], adapter_config, activate=True)

        def ask(number: int) -> int:
            model = "base" if number % 5 == 4 else f"b{number % 5}"
            return served.ask(model, max_tokens=2, stream=number % 2 == 0).status_code

        def work(requests: int, pushes: int) -> None:
            asked = pool.map(ask, range(requests))
            for number in range(pushes):
                push(number)
            assert set(asked) == {200}

        for number in range(4):
            push(number)
        work(200, 40)
        before = process.memory_info().rss, process.num_threads(), process.num_fds()
        work(1000, 200)
        after = process.memory_info().rss, process.num_threads(), process.num_fds()
    assert after[0] - before[0] < 48 * MIB
    assert after[1] <= before[1] + 9  # worker threads: at most one for each request at the same time
    assert after[2] <= before[2] + 2
