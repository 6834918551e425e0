"""Measure plans for the fused MoE layer on this GPU and write the best to `kernels/tuned.json`.

    python benchmarks/tune_moe_layer.py [--shapes Q,G,Q3] [--tokens 1,8,…] [--compile I/N]

Questions are asked in order, each with the answers before it in place; an answer must be better by 0.3% to
replace the default. `--compile I/N` only compiles the I-th of N shares, so that N processes can fill Triton's
cache at the same time before one process measures.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import torch
from moe_layer import RING, SHAPES, TOKENS, Batch, Captured, Layer, Variant, draw_batches, draw_layer

from lanewise.kernels.moe_plan import TUNED, GemmTile, MoeShape, Plan, default_plan

BETTER = 0.997
BASE = (Variant("base", None),)
ADAPTERS = (Variant("1 adapter", 1), Variant("8 adapters", 8))


@dataclass(frozen=True)
class Question:
    """Alternatives for some fields of a plan, and the batches whose summed time decides."""

    answers: Sequence[dict[str, Any]]
    asked_of: Sequence[Variant]


def questions(shape: MoeShape, tokens: int) -> Iterator[Question]:
    """What is worth asking for a batch of this size."""
    firsts = [{"rows": rows, "gate_up": tile} for rows, tile in _gemms(tokens, first=True)]
    if 1 < tokens <= 8:  # sorted first, as a larger batch is
        firsts += [
            {"direct": False, "shrink_splits": 2, "gate_up": GemmTile(columns, 4, stages)}
            for columns, stages in ((128, 3), (128, 4), (128, 5), (64, 5))
        ]
    yield Question(firsts, (*BASE, *ADAPTERS) if tokens == 8 else BASE)
    yield Question([{"down": tile} for tile in dict.fromkeys(t for _, t in _gemms(tokens))], BASE)
    if tokens > 8:
        yield Question(
            [{"base_rows": r, "base_warps": w} for r, w in ((4, 4), (8, 4), (16, 4), (8, 8))], BASE
        )
    yield Question(list(_activations(shape, tokens)), ADAPTERS)
    wide = min(2 * shape.rank, 64)
    if tokens <= 256:
        splits = (2, 4) if tokens <= 8 else (1, 2)
        yield Question(
            [{"shrink_splits": s, "shrink_columns": c} for s in splits for c in (16, 32)], ADAPTERS
        )
        yield Question([{"expand_columns": c} for c in (64, 128, 256)], ADAPTERS)
        yield Question(
            [
                {"combine_columns": c, "combine_warps": w}
                for c, w in ((128, 2), (256, 4), (512, 4), (1024, 4))
            ],
            ADAPTERS,
        )
        return
    shrinks = [(16, 32, 128), (32, 32, 128), (64, wide, 64), (64, 32, 128)]
    yield Question(
        [dict(zip(("shrink_rows", "shrink_columns", "shrink_step"), s, strict=True)) for s in shrinks],
        ADAPTERS,
    )
    mixes = [{"expand_columns": 0, "mix_columns": c, "mix_warps": w} for c, w in product((64, 128), (4, 8))]
    yield Question([*mixes, {"expand_columns": 128}], ADAPTERS)
    combines = ((1, 512, 4), (1, 1024, 4), (4, 128, 4), (2, 256, 4))
    yield Question(
        [{"combine_rows": r, "combine_columns": c, "combine_warps": w} for r, c, w in combines], BASE
    )


def _gemms(tokens: int, first: bool = False) -> Iterator[tuple[int, GemmTile]]:
    if tokens <= 256:
        splits = (1,) if not first or tokens > 8 else (4, 8) if tokens == 1 else (1, 2)
        for (columns, stages), split in product(((128, 3), (128, 4), (128, 5), (64, 3), (64, 5)), splits):
            yield 16, GemmTile(columns, 4, stages, splits=split)
        return
    tiles = ((128, 4, 2), (128, 4, 3), (128, 4, 4), (128, 8, 3))
    for rows in (32, 64) if tokens <= 1024 else (64,):
        yield from ((rows, GemmTile(*tile, weights_first=rows < 64)) for tile in tiles)


def _activations(shape: MoeShape, tokens: int) -> Iterator[dict[str, Any]]:
    few = max(2, shape.rank // 16)
    if tokens <= 1024:
        for warps in (few, 2 * few):
            yield {"activation": "pairs", "activation_warps": warps}
    if tokens > 256:
        sizes = (
            (16, 16, 4, 1),
            (16, 64, 4, 1),
            (16, 64, 4, 2),
            (16, 32, 2, 1),
            (32, 64, 4, 1),
            (32, 64, 8, 1),
        )
        for (step, rows, warps, stages), programs in product(sizes, (132, 264, 528)):
            yield {
                "activation": "tiles", "lane_step": step, "lane_rows": rows, "activation_warps": warps,
                "lane_stages": stages, "lane_programs": programs,
            }  # fmt: skip


def time_of(
    plan: Plan, shape: MoeShape, layers: Sequence[Layer], batches: Sequence[Batch], asked: Sequence[Variant]
) -> float:
    total = 0.0
    for variant in asked:
        if (variant.adapters or 0) <= len(batches[0].x):
            graph = Captured(shape, layers, batches, variant, plan)
            total += statistics.median(graph.time() for _ in range(11))
    return total


def tune(shape: MoeShape, tokens: int, layers: Sequence[Layer]) -> Plan:
    """The best plan found for one batch size."""
    batches = draw_batches(shape, tokens, len(layers), seed=2000)
    plan = default_plan(shape, tokens)
    for question in questions(shape, tokens):
        best = time_of(plan, shape, layers, batches, question.asked_of)
        seen = [f"now {best:.1f}"]
        chosen = plan
        for answer in question.answers:
            candidate = replace(plan, **answer)
            try:
                micros = time_of(candidate, shape, layers, batches, question.asked_of)
            except torch.OutOfMemoryError:
                raise
            except Exception as refused:  # noqa: BLE001 - a tile that does not fit the chip is an answer too
                seen.append(f"{_short(answer)} {type(refused).__name__}")
                continue
            seen.append(f"{_short(answer)} {micros:.1f}")
            if micros < best * BETTER:
                best, chosen = micros, candidate
        plan = chosen
        print("   " + " | ".join(seen), flush=True)
    return plan


def _short(answer: dict[str, Any]) -> str:
    parts = [
        f"{v.columns}w{v.warps}s{v.stages}{'W' if v.weights_first else 'A'}k{v.splits}"
        if isinstance(v, GemmTile)
        else str(v)
        for v in answer.values()
    ]
    return "/".join(parts)


def compile_share(share: int, shares: int, names: Sequence[str], tokens: Sequence[int]) -> None:
    """Run every answer once beside the defaults, for this share of all of them."""
    work = [
        (name, t, answer, question.asked_of[0])
        for name, t in product(names, tokens)
        for question in questions(SHAPES[name], t)
        for answer in ({}, *question.answers)
    ][share::shares]
    held: tuple[str, Layer] | None = None
    for name, t, answer, variant in work:
        shape = SHAPES[name]
        if held is None or held[0] != name:
            held = None
            held = (name, draw_layer(shape, 1))
        batches = draw_batches(shape, t, 1)[:1]
        try:
            Captured(shape, [held[1]], batches, variant, replace(default_plan(shape, t), **answer))
        except Exception as refused:  # noqa: BLE001 - reported again when it is measured
            print(name, t, _short(answer), repr(refused)[:200])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", default="Q,G")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--compile")
    arguments = parser.parse_args()
    names, tokens = arguments.shapes.split(","), [int(t) for t in arguments.tokens.split(",")]
    if arguments.compile:
        share, shares = map(int, arguments.compile.split("/"))
        compile_share(share, shares, names, tokens)
        return
    device = torch.cuda.get_device_name()
    entries = json.loads(TUNED.read_text()) if TUNED.exists() else []
    for name in names:
        shape = SHAPES[name]
        layers = [draw_layer(shape, 100 + i) for i in range(RING)]
        for t in tokens:
            print(f"{name} T={t}", flush=True)
            key = {
                "device": device, "hidden": shape.hidden, "inner": shape.inner, "experts": shape.experts,
                "rank": shape.rank, "tokens": t,
            }  # fmt: skip
            entries = [e for e in entries if any(e[k] != v for k, v in key.items())]
            entries.append(key | {"plan": asdict(tune(shape, t, layers))})
            lines = ",\n".join(json.dumps(entry) for entry in entries)
            TUNED.write_text(f"[\n{lines}\n]\n")
        del layers
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
