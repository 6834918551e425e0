"""How a batch is cut up for the fused MoE layer: tile shapes, warps and splits, by shape and device.

A plan changes the speed of the layer, never what it computes (beyond the order of fp32 sums).
`tuned.json` holds measured plans; `benchmarks/tune_moe_layer.py` writes it.
"""

import json
import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

TUNED = Path(__file__).with_name("tuned.json")
DIRECT_TOKENS = 16  # a direct batch must fit one tile of tokens


@dataclass(frozen=True)
class MoeShape:
    """What a plan is chosen by, and what a workspace is sized by; rank 0: no LoRA branch."""

    hidden: int
    inner: int
    experts: int
    top_k: int
    rank: int = 0
    slots: int = 0


@dataclass(frozen=True)
class GemmTile:
    """One expert GEMM's program: output columns, and into how many parts of K the sum is split."""

    columns: int = 128
    warps: int = 4
    stages: int = 3
    weights_first: bool = True
    splits: int = 1


@dataclass(frozen=True)
class Plan:
    """One way to run the layer.

    direct: no sorting; every pair is a tile of its own and x is rounded inside the GEMM.
    rows: pairs of one expert per GEMM tile. activation: which kernel of `moe_activation.py`; for "tiles",
    lane_rows pairs of one (expert, slot) per tile, lane_step at a time, lane_programs programs for each 128
    columns; base_rows for base-only batches.
    shrink_*: the riders for u. expand_columns: the riders for B2, or 0 to leave B2 to the combine kernel.
    """

    direct: bool = False
    rows: int = 16
    gate_up: GemmTile = GemmTile()
    down: GemmTile = GemmTile()
    shrink_rows: int = 16
    shrink_columns: int = 32
    shrink_step: int = 128
    shrink_splits: int = 1
    activation: Literal["pairs", "tiles"] = "pairs"
    activation_warps: int = 2
    lane_rows: int = 64
    lane_step: int = 16
    lane_stages: int = 1
    lane_programs: int = 264
    base_rows: int = 8
    base_warps: int = 4
    expand_columns: int = 128
    combine_rows: int = 1
    combine_columns: int = 256
    combine_warps: int = 4
    mix_columns: int = 128
    mix_warps: int = 8
    pdl: bool = True


@cache
def plan_for(shape: MoeShape, tokens: int, device: str, deterministic: bool = False) -> Plan:
    """The tuned plan nearest to this batch, or the default one.

    Deterministic: one plan for every batch size, so that a row's bytes depend on nothing beside it.
    """
    if deterministic:
        return default_plan(shape, 64)
    near = [(_distance(entry, shape, tokens, device), entry) for entry in _tuned()]
    distance, entry = min(near, key=lambda item: item[0], default=(math.inf, {}))
    if distance > 2:
        return default_plan(shape, tokens)
    return parse_plan(entry["plan"])


def default_plan(shape: MoeShape, tokens: int) -> Plan:
    """A plan that is right everywhere and reasonable on Hopper, without a measurement."""
    rank = max(16, shape.rank)
    plan = Plan(
        shrink_columns=min(2 * rank, 32),
        activation_warps=min(16, max(2, rank // 8)),
        expand_columns=64 if rank > 32 else 128,
    )
    if tokens <= 4:
        splits = 4 if tokens == 1 else 1
        return replace(
            plan,
            direct=True,
            gate_up=GemmTile(splits=splits),
            shrink_columns=16,
            shrink_splits=4,
            expand_columns=64 if rank > 32 else 256,
        )
    if tokens <= 256:
        return replace(plan, shrink_splits=2 if tokens <= 32 else 1)
    plan = replace(plan, activation="tiles", activation_warps=4, expand_columns=0)
    if tokens <= 1024:
        return replace(plan, rows=32, combine_columns=512)
    tile = GemmTile(stages=4, weights_first=False)
    return replace(
        plan,
        rows=64,
        gate_up=tile,
        down=tile,
        shrink_rows=64,
        shrink_columns=min(2 * rank, 64),
        shrink_step=64,
        combine_rows=4,
        combine_columns=128,
    )


def parse_plan(fields: dict[str, Any]) -> Plan:
    """A plan from its JSON form (`dataclasses.asdict` of it)."""
    tiles: dict[str, Any] = {name: GemmTile(**fields[name]) for name in ("gate_up", "down")}
    return Plan(**(fields | tiles))


@cache
def _tuned() -> list[dict[str, Any]]:
    return json.loads(TUNED.read_text()) if TUNED.exists() else []


def _distance(entry: dict[str, Any], shape: MoeShape, tokens: int, device: str) -> float:
    """Octaves between a tuned entry and a batch; infinite where the entry's plan cannot run it.

    Another device counts as one octave: an H100 has an H200's multiprocessors, with slower memory.
    """
    if entry["plan"]["direct"] and tokens > DIRECT_TOKENS:
        return math.inf
    wanted = {"tokens": tokens, "hidden": shape.hidden, "inner": shape.inner, "experts": shape.experts}
    far = sum(abs(math.log2(entry[name] / value)) for name, value in wanted.items())
    far += abs(math.log2(max(16, entry["rank"]) / max(16, shape.rank)))
    return far if entry["device"] == device else far + 1
