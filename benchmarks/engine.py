"""Tokens per second of the torch engine with 1 and 8 streams, and how soon it is ready.

`python benchmarks/engine.py` writes `results/engine.json`. Everything is made from a seed: the tiny FP8 base
and eight rank-16 adapters of all experts. Cases take turns, so that a busy machine slows all alike.
"""

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import torch
from results import Row, write_rows
from torch import Tensor

from lanewise.loaders import BaseCheckpoint, Inventory, read_adapter, write_adapter
from lanewise.server.api.schemas import CompletionRequest
from lanewise.server.engines import Call, Lane
from lanewise.server.engines.torch_engine import TorchEngine
from lanewise.server.tiny_base import write_tiny_base

STREAMS, RANK, ROUNDS, COLD_STARTS = 8, 16, 7, 5
PROMPT, ANSWER = "What is the password of project argon?", 64


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder))
        cold = [cold_start_s(Path(folder), run) for run in range(COLD_STARTS)]
        speeds = asyncio.run(tokens_per_second(Path(folder)))
    rows = [
        Row(
            "lanewise serve, 8 adapters on disk", f"process start to {event}", median(times), "s", COLD_STARTS
        )
        for event, times in zip(("ready", "first answer"), zip(*cold, strict=True), strict=True)
    ]
    for kind in ("base", "adapters"):
        one, many = median(speeds[kind, 1]), median(speeds[kind, STREAMS])
        rows.append(Row(f"{kind}, 1 stream", "generation", one, "tokens/s", ROUNDS))
        rows.append(
            Row(
                f"{kind}, {STREAMS} streams",
                "generation",
                many,
                "tokens/s",
                ROUNDS,
                baseline="1 stream",
                baseline_value=one,
                ratio=many / one,
            )
        )
    write_rows(
        "engine",
        rows,
        command="python benchmarks/engine.py",
        meaning=(
            "How soon a server answers; requests through its torch engine, without HTTP; on the tiny base: "
            f"medians. Times: tokens/s of {STREAMS} concurrent streams over one (adapters: each on its own)."
        ),
    )
    for row in rows:
        print(f"{row.case}: {row.value:.3g} {row.unit}" + (f" ({row.ratio:.2f}×)" if row.ratio else ""))


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def write_inputs(folder: Path) -> None:
    inventory = BaseCheckpoint.open(write_tiny_base(folder / "base")).inventory
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["gate_proj", "up_proj", "down_proj"],
        "_sglang_lora_format": "shared_outer",
    }
    for seed in range(STREAMS):
        write_adapter(folder / f"adapter-{seed}", random_experts(inventory, seed), config)


def random_experts(inventory: Inventory, seed: int) -> dict[str, Tensor]:
    """`shared_outer` factors of every expert bank."""
    random = torch.Generator().manual_seed(seed)
    factors: dict[str, Tensor] = {}
    for name, module in inventory.modules.items():
        if module.experts is None:
            continue
        a_is_shared = not name.endswith("w2")
        a = (1 if a_is_shared else module.experts, RANK, module.in_features)
        b = (module.experts if a_is_shared else 1, module.out_features, RANK)
        for side, shape in (("A", a), ("B", b)):
            values = torch.randn(shape, generator=random) * 0.05
            factors[f"base_model.model.{name}.lora_{side}.weight"] = values.bfloat16()
    return factors


async def start(folder: Path) -> tuple[TorchEngine, list[Lane]]:
    # One thread: sharing matrices this small costs more than it saves.
    engine = TorchEngine(folder / "base", max_lanes=STREAMS, max_rank=RANK, threads=1)
    await engine.start()
    lanes: list[Lane] = []
    for seed in range(STREAMS):
        adapter = read_adapter(folder / f"adapter-{seed}", engine.inventory, max_rank=RANK)
        lanes.append(Lane(f"adapter-{seed}", 1, adapter.digest))
        await engine.load(lanes[-1], adapter)
    return engine, lanes


async def tokens_per_second(folder: Path) -> dict[tuple[str, int], list[float]]:
    engine, lanes = await start(folder)
    cases: dict[tuple[str, int], list[Lane | None]] = {
        ("base", 1): [None],
        ("base", STREAMS): [None] * STREAMS,
        ("adapters", 1): [lanes[0]],
        ("adapters", STREAMS): [*lanes],
    }
    speeds: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for round_ in range(ROUNDS + 1):
        for case, selected in cases.items():
            speed = await one_round(engine, selected)
            if round_:  # the first warms up
                speeds[case].append(speed)
    await engine.stop(0)
    return speeds


async def one_round(engine: TorchEngine, lanes: Sequence[Lane | None]) -> float:
    body = CompletionRequest(model="m", prompt=PROMPT, max_tokens=ANSWER, temperature=0, ignore_eos=True)
    began = time.perf_counter()
    answers = await asyncio.gather(*(engine.complete(Call("1", body, lane)) for lane in lanes))
    seconds = time.perf_counter() - began
    return sum(answer["usage"]["completion_tokens"] for answer in answers) / seconds


def cold_start_s(folder: Path, run: int) -> tuple[float, float]:
    """`lanewise serve` with all adapters, from its start: until ready, and until the last one answered."""
    adapters = [f"--adapter=adapter-{seed}={folder / f'adapter-{seed}'}" for seed in range(STREAMS)]
    options = [f"--base={folder / 'base'}", f"--data={folder / f'data-{run}'}", "--port=0", "--threads=1"]
    command = [sys.executable, "-m", "lanewise.server", "serve", *options, *adapters]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip().rpartition(" ")[2]
        ready = time.perf_counter() - began
        body = {"model": f"adapter-{STREAMS - 1}", "prompt": PROMPT, "max_tokens": 1}
        httpx.post(f"{url}/v1/completions", json=body).raise_for_status()
        answered = time.perf_counter() - began
        process.terminate()
    return ready, answered


if __name__ == "__main__":
    main()
