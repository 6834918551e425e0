"""The end of the layer: weigh and add up each token's experts, join the LoRA delta in fp32, round once."""

# Triton's types exist when a kernel is traced, not before.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportUnknownParameterType=false, reportOperatorIssue=false, reportCallIssue=false

import triton
import triton.language as tl

from .moe_route import read_tile, start_after_predecessor


@triton.jit(do_not_specialize=["tokens"])
def combine_kernel(
    y_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    out_ptr: tl.tensor,
    tokens: tl.tensor,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LORA: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t] = Σ_k p[t,k]·y[t,k] + delta[t]: y [T·k, H], p [T, k], delta [T, H] fp32 → out [T, H]."""
    start_after_predecessor(PDL)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (token < tokens)[:, None] & (column < H)[None, :]
    at = token[:, None] * H + column[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if LORA:
        adapted = tl.load(slots_ptr + token, mask=token < tokens, other=-1) >= 0
        total += tl.load(delta_ptr + at, mask=inside & adapted[:, None], other=0.0)
    for k in tl.static_range(TOP_K):
        weight = tl.load(weights_ptr + token * TOP_K + k, mask=token < tokens, other=0.0)
        y_ptrs = y_ptr + (token * TOP_K + k)[:, None] * H + column[None, :]
        total += weight[:, None] * tl.load(y_ptrs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def combine_expand_kernel(
    y_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    low_ptr: tl.tensor,
    b2_ptr: tl.tensor,
    lora_scale_ptr: tl.tensor,
    token_order_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    out_ptr: tl.tensor,
    H: tl.constexpr,
    R: tl.constexpr,
    RANK: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t] = Σ_k p[t,k]·y[t,k] + s·B2·low[t], for tiles of tokens of one slot.

    y [T·k, H], p [T, k], low [T, r], B2 [S, H, r], s [S] → out [T, H]. Saves a trip of delta [T, H] through
    memory, which pays once tiles are full.
    """
    start_after_predecessor(PDL)
    tile = tl.program_id(0)
    if tile < tl.load(tiles_ptr):
        bucket, first, end = read_tile(tiles_ptr, tile)
        slot = bucket - 1
        position = first + tl.arange(0, ROWS)
        valid = position < end
        token = tl.load(token_order_ptr + tl.minimum(position, end - 1))
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        rank = tl.arange(0, RANK)
        live = rank < tl.where(slot >= 0, R, 0)
        b_ptrs = b2_ptr + tl.maximum(slot, 0).to(tl.int64) * (H * R) + column[None, :] * R + rank[:, None]
        b2 = tl.load(b_ptrs, mask=live[:, None] & (column < H)[None, :], other=0.0)
        low = tl.load(low_ptr + token[:, None] * R + rank[None, :], mask=live[None, :], other=0.0)
        k = tl.arange(0, TOP_K_PADDED)[None, :, None]
        pair = token[:, None, None] * TOP_K + k
        weight = tl.load(weights_ptr + pair, mask=k < TOP_K, other=0.0)
        inside = (k < TOP_K) & (column < H)[None, None, :]
        y = tl.load(y_ptr + pair * H + column[None, None, :], mask=inside, other=0.0).to(tl.float32)
        total = tl.sum(weight * y, 1) + tl.dot(low, b2) * tl.load(lora_scale_ptr + tl.maximum(slot, 0))
        at = token[:, None] * H + column[None, :]
        tl.store(
            out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (column < H)[None, :]
        )
