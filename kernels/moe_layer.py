"""The fused MoE layer: experts and their LoRA branch in 4 to 6 launches, none of them added by LoRA.

The maths is `reference.lora_experts`; README.md draws the data flow. Everything that varies from step to
step (routing, slots, which adapters) is data in device memory: grids are fixed by the number of tokens,
nothing is allocated and the host waits for nothing, so a call can be captured in a CUDA graph.
"""

# A kernel's parameters are typed as the kernel sees them, not as its caller does.
# pyright: reportArgumentType=false

from dataclasses import dataclass, field

import torch
import triton
from torch import Tensor
from triton import knobs

from .lora import ExpertFactors, ExpertWeights
from .moe_activation import activate_base_kernel, activate_pairs_kernel, activate_tiles_kernel
from .moe_combine import combine_expand_kernel, combine_kernel
from .moe_gemm import down_kernel, gate_up_kernel
from .moe_plan import DIRECT_TOKENS, MoeShape, Plan, plan_for
from .moe_route import prepare_kernel, scatter_kernel

BLOCK = 128
MIX_ROWS = 16  # tokens of one slot per rider of the down GEMM and per program of `combine_expand_kernel`
_LARGE_SORT = 2048  # pairs from which one program is too slow a sorter
_PAIR_CHUNK = 512
_BUCKET_CHUNK = 4096
_COMPILED = not knobs.runtime.interpret  # Triton's interpreter has no inline assembly
_MAX_SPLITS = 8
_TOKEN_CELLS = 4096  # tokens × slots that one program counts at once


class MoeWorkspace:
    """Every buffer of the layer, allocated once for at most `tokens` tokens of one shape; layers share it.

    `dtype` is the activations', `weight_dtype` the bank's (float8_e4m3fn: x and h are rounded for the GEMMs).
    A workspace serves one stream at a time.
    """

    def __init__(
        self,
        shape: MoeShape,
        tokens: int,
        dtype: torch.dtype = torch.bfloat16,
        weight_dtype: torch.dtype = torch.float8_e4m3fn,
        device: torch.device | str = "cuda",
        deterministic: bool = False,
    ):
        assert shape.hidden % BLOCK == shape.inner % BLOCK == 0, "hidden and inner come in blocks of 128"
        self.shape, self.tokens, self.dtype, self.deterministic = shape, tokens, dtype, deterministic
        self.device = torch.device(device)
        self.device_name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        pairs, groups = tokens * shape.top_k, shape.inner // BLOCK
        assert pairs * max(shape.hidden, 2 * shape.inner) < 2**31, "rows are indexed in 32 bits"
        rank = max(1, shape.rank)
        buckets = triton.next_power_of_2(shape.experts) * self.lanes

        def buffer(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(sizes, dtype=dtype, device=self.device)

        self.x_q = buffer(tokens, shape.hidden, dtype=weight_dtype)
        self.x_scale = buffer(tokens, shape.hidden // BLOCK, dtype=torch.float32)
        self.counts = buffer(buckets + self.lanes).zero_()
        self.starts = buffer(triton.cdiv(pairs, _PAIR_CHUNK) * buckets)
        self.ranks, self.order = buffer(pairs), buffer(pairs)
        self.tiles, self.lane_tiles = buffer(1 + pairs, 4), buffer(1 + pairs, 4)
        self.token_starts = buffer(self.lanes)
        self.token_ranks, self.token_order = buffer(tokens), buffer(tokens)
        self.token_tiles, self.mix_tiles = buffer(1 + tokens, 4), buffer(1 + tokens, 4)
        # Sums in parts are fp32, whole sums in the activations' dtype; a direct batch is small.
        parts = min(tokens, DIRECT_TOKENS) * shape.top_k * _MAX_SPLITS
        self.gate_up_parts = buffer(parts * 2 * shape.inner, dtype=torch.float32)
        self.gate_up = buffer(pairs, 2 * shape.inner, dtype=dtype)
        self.u_parts = buffer(_MAX_SPLITS * tokens * 2 * rank, dtype=torch.float32)
        self.u = buffer(tokens * 2 * rank, dtype=dtype)
        self.h = buffer(pairs, shape.inner, dtype=weight_dtype)
        self.h_scale = buffer(pairs, groups, dtype=torch.float32)
        self.low_parts = buffer(pairs, groups, rank, dtype=torch.float32)
        self.low = buffer(tokens, rank, dtype=dtype)
        self.delta = buffer(tokens, shape.hidden, dtype=torch.float32)
        self.y = buffer(pairs, shape.hidden, dtype=dtype)

    @property
    def lanes(self) -> int:
        """Buckets per expert in a sort by (expert, slot): every slot, and the base."""
        return max(2, triton.next_power_of_2(self.shape.slots + 1))


def moe_layer(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    bank: ExpertWeights,
    factors: ExpertFactors | None,
    slots: Tensor | None,
    workspace: MoeWorkspace,
    out: Tensor | None = None,
    plan: Plan | None = None,
) -> Tensor:
    """y[t] = Σ_e p_e·(W2_e·h_e + LoRA) for `shared_outer` factors; see `reference.lora_experts`.

    Shapes: x [T, H] contiguous, experts [T, k] int32 or int64, weights [T, k] fp32, slots [T] int32 (−1: base
    row) → out [T, H] in x's dtype (allocated if not given). Without factors the layer is the base's alone.
    """
    call = _Call(x, experts, weights, bank, factors, slots, workspace, plan)
    if out is None:
        out = torch.empty_like(x)
    if not call.plan.direct:
        call.route()
    call.gate_up()
    call.activate()
    call.down()
    call.combine(out)
    return out


@dataclass
class _Call:
    """One call of the layer: its inputs, and a launch per step."""

    x: Tensor
    experts: Tensor
    weights: Tensor
    bank: ExpertWeights
    factors: ExpertFactors | None
    slots: Tensor | None
    space: MoeWorkspace
    chosen: Plan | None
    plan: Plan = field(init=False)

    def __post_init__(self) -> None:
        shape, space = self.space.shape, self.space
        tokens, hidden = self.x.shape
        assert tokens <= space.tokens, f"{tokens} tokens in a workspace for {space.tokens}"
        assert (hidden, *self.experts.shape) == (shape.hidden, tokens, shape.top_k), (
            "not the workspace's shape"
        )
        assert all(t.is_contiguous() for t in (self.x, self.experts, self.weights))
        assert self.weights.dtype == torch.float32, f"weights are {self.weights.dtype}, expected float32"
        assert (self.factors is None) == (self.slots is None), "factors and slots come together"
        if self.factors is not None and self.slots is not None:
            assert self.factors.shared_outer, "the fused layer reads shared_outer factors only"
            assert self.factors.rank == shape.rank, "one workspace, one rank"
            assert len(self.factors.scale) <= shape.slots, "more slots than the workspace can sort"
            assert self.slots.shape == (tokens,), "one slot per token"
        self.plan = self.chosen or plan_for(shape, tokens, space.device_name, space.deterministic)
        assert max(self.plan.gate_up.columns, self.plan.down.columns) <= BLOCK, "one scale per GEMM tile"
        assert tokens <= DIRECT_TOKENS or not self.plan.direct, "a direct batch fits one tile of tokens"
        assert self.plan.direct or self.plan.gate_up.splits == 1, "only a direct batch is split over K"
        assert max(self.plan.gate_up.splits, self.plan.shrink_splits) <= _MAX_SPLITS

    @property
    def tokens(self) -> int:
        return len(self.x)

    @property
    def pairs(self) -> int:
        return self.experts.numel()

    @property
    def lora(self) -> bool:
        return self.factors is not None

    @property
    def quant(self) -> bool:
        return self.bank.quantized

    @property
    def rank(self) -> int:
        return max(1, self.space.shape.rank)

    @property
    def padded_rank(self) -> int:
        return max(16, triton.next_power_of_2(self.rank))

    @property
    def lanes(self) -> int:
        """Buckets per expert in this call's sort."""
        return self.space.lanes if self.lora and self.plan.activation == "tiles" else 1

    @property
    def buckets(self) -> int:
        return triton.next_power_of_2(self.space.shape.experts) * self.lanes

    @property
    def counters(self) -> int:
        """How many routing counters this call uses and must leave at zero."""
        if self.plan.direct:
            return 0
        return self.buckets + (self.space.lanes if self.lora else 0)

    @property
    def gemm_tiles(self) -> int:
        """A bound on the tiles of a GEMM: every expert may end with a partial one."""
        if self.plan.direct:
            return self.pairs
        return min(self.pairs, self.space.shape.experts + triton.cdiv(self.pairs, self.plan.rows))

    def slot_tiles(self, rows: int) -> int:
        """A bound on the tiles of tokens of one slot."""
        if self.plan.direct:
            return self.tokens
        return min(self.tokens, triton.cdiv(self.tokens, rows) + self.space.shape.slots + 1)

    @property
    def mix_tiles(self) -> Tensor:
        """The list of tiles of MIX_ROWS tokens of one slot."""
        return self.space.token_tiles if self.plan.shrink_rows == MIX_ROWS else self.space.mix_tiles

    @property
    def gate_up_out(self) -> Tensor:
        return self.space.gate_up_parts if self.plan.direct else self.space.gate_up

    @property
    def u(self) -> Tensor:
        return self.space.u_parts if self.plan.shrink_splits > 1 else self.space.u

    @property
    def slots_or_any(self) -> Tensor:
        """The slots, or (when no kernel will read them) some tensor to point at."""
        return self.experts if self.slots is None else self.slots

    def options(self, warps: int, stages: int = 3) -> dict[str, int | bool]:
        pdl: dict[str, int | bool] = {"launch_pdl": True} if self.plan.pdl else {}
        return {"num_warps": warps, "num_stages": stages, **pdl}

    def route(self) -> None:
        """Sort the pairs by expert and the tokens by slot, and round x."""
        space, plan, shape = self.space, self.plan, self.space.shape
        large = self.pairs > _LARGE_SORT
        counters = triton.cdiv(self.pairs, _PAIR_CHUNK) if large else 1
        chunk = _PAIR_CHUNK if large else max(16, triton.next_power_of_2(self.pairs))
        groups = 8 if self.tokens <= 128 else 32
        rounding = triton.cdiv(self.tokens * (shape.hidden // BLOCK), groups) if self.quant else 0
        lanes = {
            "TOP_K": shape.top_k, "BUCKETS": self.buckets, "CHUNK": min(self.buckets, _BUCKET_CHUNK),
            "LANES": self.lanes, "SLOT_BUCKETS": space.lanes, "COUNTERS": counters, "PAIR_CHUNK": chunk,
            "ROWS": plan.rows, "LANE_ROWS": plan.lane_rows, "TOKEN_ROWS": plan.shrink_rows,
            "MIX_ROWS": MIX_ROWS, "PDL": plan.pdl, **self.options(8),
        }  # fmt: skip
        token_chunk = min(_TOKEN_CELLS // space.lanes, max(16, triton.next_power_of_2(self.tokens)))
        token_counters = (triton.cdiv(self.tokens, token_chunk) if large else 1) if self.lora else 0
        by_slot = (
            space.counts[self.buckets :], space.token_starts, space.token_ranks, space.token_order,
            space.token_tiles, space.mix_tiles,
        )  # fmt: skip
        prepare_kernel[(counters + token_counters + rounding,)](
            self.x, space.x_q, space.x_scale, self.experts, self.slots_or_any,
            space.counts, space.starts, space.ranks, space.order, space.tiles, space.lane_tiles,
            *by_slot, self.tokens, self.pairs,
            H=shape.hidden, TOKEN_COUNTERS=token_counters, TOKEN_CHUNK=token_chunk, GROUPS=groups,
            QUANT=self.quant, **lanes,
        )  # fmt: skip
        if large:
            scatter_kernel[(counters + int(self.lora),)](
                self.experts, self.slots_or_any, space.counts, space.starts, space.ranks, space.order,
                space.tiles, space.lane_tiles, *by_slot, self.tokens, self.pairs, **lanes,
            )  # fmt: skip

    def gate_up(self) -> None:
        """[g;v] = W13_e·x, and beside it u = s·A13·x."""
        space, plan, shape, factors = self.space, self.plan, self.space.shape, self.factors
        blocks = triton.cdiv(2 * self.rank, plan.shrink_columns)
        riders = self.slot_tiles(plan.shrink_rows) * blocks * plan.shrink_splits if self.lora else 0
        columns = 2 * shape.inner // plan.gate_up.columns
        gate_up_kernel[(riders + self.gemm_tiles * columns * plan.gate_up.splits,)](
            self.x if plan.direct or not self.quant else space.x_q, space.x_scale,
            self.bank.w13, self.bank.s13, self.gate_up_out,
            self.experts, space.order, space.tiles,
            self.x, factors and factors.a13, factors and factors.scale, self.u,
            self.slots_or_any, space.token_order, space.token_tiles, self.tokens, self.pairs, riders,
            H=shape.hidden, I2=2 * shape.inner, TOP_K=shape.top_k, R2=2 * self.rank,
            ROWS=plan.rows, COLUMNS=plan.gate_up.columns, SPLITS=plan.gate_up.splits,
            WEIGHTS_FIRST=plan.gate_up.weights_first,
            RIDER_ROWS=plan.shrink_rows, RIDER_COLUMNS=plan.shrink_columns, RIDER_STEP=plan.shrink_step,
            RIDER_SPLITS=plan.shrink_splits, LORA=self.lora, QUANT=self.quant, DIRECT=plan.direct,
            PDL=plan.pdl, **self.options(plan.gate_up.warps, plan.gate_up.stages),
        )  # fmt: skip

    def activate(self) -> None:
        """h = silu(g + …) ⊙ (v + …) with B13's delta, and A2's part of the down side."""
        space, plan, shape, factors = self.space, self.plan, self.space.shape, self.factors
        blocks = shape.inner // BLOCK
        common = {
            "I": shape.inner, "COUNTERS": self.counters, "QUANT": self.quant, "FAST": _COMPILED,
            "PDL": plan.pdl,
        }  # fmt: skip
        if factors is None:
            rows = min(plan.base_rows, triton.next_power_of_2(self.pairs))
            activate_base_kernel[(triton.cdiv(self.pairs, rows), blocks)](
                self.gate_up_out, space.h, space.h_scale, space.counts, self.pairs,
                ROWS=rows, SPLITS=plan.gate_up.splits, **common, **self.options(plan.base_warps),
            )  # fmt: skip
            return
        common |= {
            "E": shape.experts, "R": self.rank, "RANK": self.padded_rank, "TOP_K": shape.top_k,
            "RIDER_SPLITS": plan.shrink_splits,
        }  # fmt: skip
        if plan.activation == "pairs":
            activate_pairs_kernel[(self.pairs, blocks)](
                self.gate_up_out, space.h, space.h_scale, self.u, factors.b13, factors.a2, space.low_parts,
                self.experts, self.weights, self.slots_or_any, space.order, space.counts,
                self.tokens, self.pairs,
                SPLITS=plan.gate_up.splits, DIRECT=plan.direct, **common,
                **self.options(plan.activation_warps),
            )  # fmt: skip
            return
        activate_tiles_kernel[(min(self.pairs, plan.lane_programs), blocks)](
            self.gate_up_out, space.h, space.h_scale, self.u, factors.b13, factors.a2, space.low_parts,
            self.weights, space.order, space.lane_tiles, space.counts, self.tokens,
            LANES=self.lanes, ROWS=plan.lane_step, **common,
            **self.options(plan.activation_warps, plan.lane_stages),
        )  # fmt: skip

    def down(self) -> None:
        """y = W2_e·h per pair, and beside it the down side's delta (or its low-rank sum)."""
        space, plan, shape, factors = self.space, self.plan, self.space.shape, self.factors
        expand = plan.expand_columns > 0
        blocks = triton.cdiv(shape.hidden, plan.expand_columns) if expand else 1
        riders = self.slot_tiles(MIX_ROWS) * blocks if self.lora else 0
        columns = shape.hidden // plan.down.columns
        down_kernel[(riders + self.gemm_tiles * columns,)](
            space.h, space.h_scale, self.bank.w2, self.bank.s2, space.y,
            self.experts, space.order, space.tiles,
            space.low_parts, factors and factors.b2, factors and factors.scale,
            space.delta if expand else space.low, self.slots_or_any, space.token_order, self.mix_tiles,
            self.tokens, self.pairs, riders,
            H=shape.hidden, I=shape.inner, R=self.rank, RANK=self.padded_rank,
            PARTS=shape.top_k * (shape.inner // BLOCK), ROWS=plan.rows, COLUMNS=plan.down.columns,
            WEIGHTS_FIRST=plan.down.weights_first, RIDER_ROWS=MIX_ROWS,
            RIDER_COLUMNS=max(16, plan.expand_columns), EXPAND=expand, LORA=self.lora, QUANT=self.quant,
            DIRECT=plan.direct, PDL=plan.pdl, **self.options(plan.down.warps, plan.down.stages),
        )  # fmt: skip

    def combine(self, out: Tensor) -> None:
        """out[t] = Σ_k p·y + delta."""
        space, plan, shape, factors = self.space, self.plan, self.space.shape, self.factors
        if factors is not None and not plan.expand_columns:
            blocks = triton.cdiv(shape.hidden, plan.mix_columns)
            combine_expand_kernel[(self.slot_tiles(MIX_ROWS), blocks)](
                space.y, self.weights, space.low, factors.b2, factors.scale,
                space.token_order, self.mix_tiles, out,
                H=shape.hidden, R=self.rank, RANK=self.padded_rank, TOP_K=shape.top_k,
                TOP_K_PADDED=triton.next_power_of_2(shape.top_k), ROWS=MIX_ROWS, COLUMNS=plan.mix_columns,
                PDL=plan.pdl, **self.options(plan.mix_warps),
            )  # fmt: skip
            return
        blocks = triton.cdiv(shape.hidden, plan.combine_columns)
        combine_kernel[(triton.cdiv(self.tokens, plan.combine_rows), blocks)](
            space.y, self.weights, space.delta, self.slots_or_any, out, self.tokens,
            H=shape.hidden, TOP_K=shape.top_k, ROWS=plan.combine_rows, COLUMNS=plan.combine_columns,
            LORA=self.lora, PDL=plan.pdl, **self.options(plan.combine_warps),
        )  # fmt: skip
