"""One MoE layer on a GPU, base rows and adapters, timed as a server runs it: replays of a CUDA graph.

    python benchmarks/moe_layer.py [--shapes Q,G,Q3] [--tokens 1,8,…] [--sglang FILE …]

A graph holds a ring of layers with their own weights, inputs and routing, so no weight is in the cache.
All variants of one case are captured first and replayed in turn; a figure is the median over the rounds.
`--sglang` files come from `sglang_moe_layer.py`, run on the same machine: the best base among them is B.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from results import Row, write_rows
from torch import Tensor

from lanewise.kernels.lora import ExpertFactors, ExpertWeights
from lanewise.kernels.moe_layer import MoeWorkspace, moe_layer
from lanewise.kernels.moe_plan import MoeShape, Plan, plan_for

SHAPES = {
    "Q": MoeShape(hidden=2048, inner=512, experts=256, top_k=8, rank=16, slots=8),  # Qwen3.5-35B-A3B
    "G": MoeShape(hidden=6144, inner=256, experts=256, top_k=8, rank=64, slots=8),  # GLM-5.2, a TP8 slice
    "Q3": MoeShape(hidden=2048, inner=768, experts=128, top_k=8, rank=16, slots=8),  # Qwen3-30B-A3B
    "Q64": MoeShape(hidden=2048, inner=512, experts=256, top_k=8, rank=16, slots=64),
}
TOKENS = (1, 8, 32, 128, 512, 4096)
RING = 6
ROUNDS = 15
# Wanted shares of SGLang's best base-only layer, for each of TOKENS.
BASE_ROWS = ("base", "base, no PDL", "base rows, LoRA on")
AIMS: dict[tuple[str, str], tuple[float | None, ...]] = {
    ("Q", "base rows only"): (0.73, 0.94, 0.92, 0.95, 0.92, 0.98),
    ("Q", "1 adapter"): (0.75, 0.96, 0.93, 0.97, 0.96, 1.03),
    ("Q", "8 adapters"): (None, 0.96, 0.94, 0.99, 1.06, 1.10),
    ("G", "1 adapter"): (0.71, 0.97, 0.95, 0.96, 0.92, 1.02),
    ("G", "8 adapters"): (None, 1.00, 0.97, 1.00, 1.03, 1.08),
}
COMMAND = "python benchmarks/moe_layer.py --sglang FILE …"
MEANING = (
    "One MoE layer in a CUDA graph over a ring of layers. B, where given, is SGLang's best base layer in "
    "the same run: `times` above 1 is faster than it. Own base: our layer with LoRA off, with or without PDL."
)


@dataclass(frozen=True)
class Variant:
    """What a batch holds. adapters None: LoRA off; 0: LoRA on, base rows only; n: rows of n adapters."""

    name: str
    adapters: int | None
    pdl: bool = True
    deterministic: bool = False


VARIANTS = (
    Variant("base", None),
    Variant("base, no PDL", None, pdl=False),
    Variant("base rows, LoRA on", 0),
    Variant("1 adapter", 1),
    Variant("8 adapters", 8),
    Variant("1 adapter, no PDL", 1, pdl=False),
    Variant("8 adapters, no PDL", 8, pdl=False),
    Variant("32 adapters", 32),
    Variant("64 adapters", 64),
    Variant("8 adapters, deterministic", 8, deterministic=True),
)


@dataclass(frozen=True)
class Layer:
    bank: ExpertWeights
    factors: ExpertFactors


@dataclass(frozen=True)
class Batch:
    x: Tensor
    experts: Tensor
    weights: Tensor


def draw_layer(shape: MoeShape, seed: int) -> Layer:
    draw = torch.Generator(device="cuda").manual_seed(seed)
    H, I, E, S, r = shape.hidden, shape.inner, shape.experts, shape.slots, shape.rank  # noqa: E741

    def normal(*size: int, fan: float) -> Tensor:
        return (
            torch.randn(size, generator=draw, device="cuda", dtype=torch.bfloat16) / fan**0.5
        ).contiguous()

    def fp8(n: int, k: int) -> tuple[Tensor, Tensor]:
        q = torch.cat([(normal(1, n, k, fan=1e-4)).to(torch.float8_e4m3fn) for _ in range(E)])
        return q, (0.5 + torch.rand(E, n // 128, k // 128, generator=draw, device="cuda")) / (100 * k**0.5)

    (w13, s13), (w2, s2) = fp8(2 * I, H), fp8(H, I)
    b13 = torch.stack([normal(E, 2 * I, r, fan=4 * r) for _ in range(S)])
    a2 = torch.stack([normal(E, r, I, fan=I) for _ in range(S)])
    factors = ExpertFactors(
        normal(S, 1, 2 * r, H, fan=H), b13, a2, normal(S, 1, H, r, fan=4 * r), torch.ones(S, device="cuda")
    )
    return Layer(ExpertWeights(w13, w2, s13, s2), factors)


def draw_batch(shape: MoeShape, tokens: int, seed: int, skew: bool = False) -> Batch:
    """Uniform routing, or (skew) every token at expert 0 and a quarter of the experts empty."""
    draw = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(tokens, shape.hidden, generator=draw, device="cuda").bfloat16()
    scores = torch.rand(tokens, shape.experts, generator=draw, device="cuda")
    if skew:
        scores[:, 0] += 1
        scores[:, -shape.experts // 4 :] -= 1
    weights = torch.rand(tokens, shape.top_k, generator=draw, device="cuda") + 0.2
    return Batch(x, scores.topk(shape.top_k, 1).indices.int(), weights / weights.sum(1, keepdim=True))


def draw_batches(
    shape: MoeShape, tokens: int, ring: int, seed: int = 1000, skew: bool = False
) -> list[Batch]:
    """One batch per pass of a layer; small ones go round the ring often, each time to other experts."""
    rounds = 8 if tokens <= 8 else 2 if tokens <= 128 else 1
    return [draw_batch(shape, tokens, seed + i, skew) for i in range(ring * rounds)]


def slots_of(tokens: int, adapters: int) -> Tensor:
    """Decode: adapters take turns; prefill: each has a run of tokens, as sequences do."""
    turn = torch.arange(tokens, device="cuda")
    if adapters == 0:
        return torch.full((tokens,), -1, dtype=torch.int32, device="cuda")
    slots = turn % adapters if tokens <= 512 else turn * adapters // tokens
    return slots.int()


class Captured:
    """A graph of one variant over the ring; holds every buffer that the graph points at."""

    def __init__(
        self,
        shape: MoeShape,
        layers: Sequence[Layer],
        batches: Sequence[Batch],
        variant: Variant,
        plan: Plan | None = None,
    ):
        tokens = len(batches[0].x)
        self.space = MoeWorkspace(shape, tokens, deterministic=variant.deterministic)
        chosen = plan or plan_for(shape, tokens, self.space.device_name, variant.deterministic)
        self.plan = replace(chosen, pdl=chosen.pdl and variant.pdl)
        self.layers, self.batches = layers, batches
        self.slots = None if variant.adapters is None else slots_of(tokens, variant.adapters)
        self.out = torch.empty_like(batches[0].x)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run(batches[: len(layers)])
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self._run(batches)
        torch.cuda.synchronize()

    def _run(self, batches: Sequence[Batch]) -> None:
        for layer, batch in zip(cycle(self.layers), batches, strict=False):
            factors = None if self.slots is None else layer.factors
            moe_layer(
                batch.x, batch.experts, batch.weights, layer.bank, factors, self.slots,
                self.space, self.out, self.plan,
            )  # fmt: skip

    def time(self) -> float:
        """µs per layer of one replay."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / len(self.batches)

    def kernels(self) -> list[tuple[str, float]]:
        """(kernel, median µs) of one layer, in order, as the profiler sees them."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            self.graph.replay()
            torch.cuda.synchronize()
        events: list[Any] = [e for e in seen.events() or [] if e.name.endswith("_kernel")]
        events.sort(key=_start)
        per_layer = len(events) // len(self.batches)
        return [
            (events[i].name, statistics.median(e.time_range.elapsed_us() for e in events[i::per_layer]))
            for i in range(per_layer)
        ]


def _start(event: Any) -> float:
    return event.time_range.start


def interleaved(captured: dict[str, Captured], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Every variant's times, two replays each in turn, after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in captured}
    for graph in captured.values():
        graph.time()
    for _ in range(rounds):
        for name, graph in captured.items():
            times[name] += [graph.time(), graph.time()]
    return times


def against_aims(name: str, tokens: int, medians: dict[str, float], base: float) -> list[Row]:
    """What was wanted, as a share of SGLang's best base; `times` below 1: missed."""
    rows: list[Row] = []
    for (shape, variant), aims in AIMS.items():
        measured = [medians[v] for v in BASE_ROWS if v in medians] if variant == "base rows only" else []
        measured += [medians[variant]] if variant in medians else []
        if shape == name and measured and tokens in TOKENS:
            aim, share = aims[TOKENS.index(tokens)], min(measured) / base
            case = f"{name} T={tokens}, {variant}"
            if aim is not None:
                rows.append(Row(case, "layer ÷ B", share, "×", 1, "aim", aim, aim / share))
    return rows


def copy_bandwidth() -> float:
    """Bytes per second of a large device copy, reads and writes counted."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    target.copy_(source)
    start.record()
    for _ in range(5):
        target.copy_(source)
    end.record()
    end.synchronize()
    return 5 * 2 * len(source) / (start.elapsed_time(end) * 1e-3)


def measure_case(
    name: str, tokens: int, layers: Sequence[Layer], best: dict[str, float], skew: bool = False
) -> list[Row]:
    """All variants of one shape and batch size. `best`: what SGLang took for the same cases."""
    shape = SHAPES[name]
    batches = draw_batches(shape, tokens, len(layers), skew=skew)
    wanted = [v for v in VARIANTS if (v.adapters or 0) <= min(shape.slots, tokens)]
    captured = {v.name: Captured(shape, layers, batches, v) for v in wanted}
    times = interleaved(captured)
    medians = {variant: statistics.median(values) for variant, values in times.items()}
    own = min(v for variant, v in medians.items() if variant.startswith("base"))
    name = f"{name} skewed" if skew else name
    base = best.get(f"{name} T={tokens}")
    rows: list[Row] = []
    for variant, micros in medians.items():
        case, n = f"{name} T={tokens}, {variant}", len(times[variant])
        against = ("SGLang's best base", base, base / micros) if base else (None, None, None)
        rows.append(Row(case, "layer", micros, "µs", n, *against))
        rows.append(Row(case, "layer ÷ own base", micros / own, "×", n))
    if base:
        rows += against_aims(name, tokens, medians, base)
    for variant in ("base, no PDL", "1 adapter, no PDL", "8 adapters, no PDL"):
        if variant in captured:
            seen = captured[variant].kernels()
            rows.append(Row(f"{name} T={tokens}, {variant}", "launches", len(seen), "kernels", 1))
            print(
                f"   {variant}: "
                + " ".join(f"{kernel.removesuffix('_kernel')} {us:.1f}" for kernel, us in seen)
            )
    line = " ".join(
        f"{v}={us:.1f}({us / own:.3f}{f',{us / base:.3f}B' if base else ''})" for v, us in medians.items()
    )
    print(f"{name} T={tokens}: {line}", flush=True)
    return rows


def best_of_sglang(files: Sequence[Path]) -> dict[str, float]:
    """The fastest base-only time per case over all of SGLang's runs."""
    best: dict[str, float] = {}
    for file in files:
        for row in json.loads(file.read_text()):
            if row["path"] == "base":
                key = f"{row['shape']} T={row['tokens']}"
                best[key] = min(best.get(key, row["us"]), row["us"])
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", default="Q,G,Q3")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--name", default="moe_layer", help="of the results file")
    parser.add_argument("--skew", action="store_true", help="one hot expert, a quarter of them empty")
    parser.add_argument("--ring", type=int, default=RING, help="layers in the ring; 1 only compiles quickly")
    parser.add_argument("--sglang", nargs="*", type=Path, default=[])
    arguments = parser.parse_args()
    best = best_of_sglang(arguments.sglang)
    rows = [Row("device copy, 2 GiB", "bandwidth", copy_bandwidth() / 1e12, "TB/s", 5)]
    for file in arguments.sglang:
        rows += [
            Row(
                f"{r['shape']} T={r['tokens']}, SGLang {r['version']} {r['path']}, {r['adapters']} adapters",
                "layer",
                r["us"],
                "µs",
                r["n"],
            )
            for r in json.loads(file.read_text())
        ]
    for name in arguments.shapes.split(","):
        layers = [draw_layer(SHAPES[name], 100 + i) for i in range(arguments.ring)]
        for tokens in map(int, arguments.tokens.split(",")):
            rows += measure_case(name, tokens, layers, best, arguments.skew)
            write_rows(arguments.name, rows, command=COMMAND, meaning=MEANING)
        del layers
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
