"""The two expert GEMMs, each with riders: programs of the same launch that do LoRA work beside it.

`gate_up_kernel`:  [g;v]_e = W13_e·x          riders: u = s·A13·x
`down_kernel`:     y_pair = W2_e·h            riders: Σ_e p_e·A2_e·h_e summed over its parts, and B2 on top

Riders come first in the grid, finish long before the GEMM does, and their results are read one launch later.
The GEMMs themselves know nothing of LoRA. A FP8 product is scaled after every 128 columns, as fp8.py says.
"""

# Triton's types exist when a kernel is traced, not before.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportUnknownParameterType=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false

import triton
import triton.language as tl

from .moe_route import BLOCK, quantize, read_tile, start_after_predecessor


@triton.jit
def _expert_product(
    a_ptr: tl.tensor,
    as_ptr: tl.tensor,
    w_ptr: tl.tensor,
    ws_ptr: tl.tensor,
    expert: tl.tensor,
    rows: tl.tensor,
    column_block: tl.tensor,
    first_step: tl.tensor,
    end_step: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    QUANT: tl.constexpr,
    QUANT_HERE: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
):
    """a[rows]·W_eᵀ over K steps of 128 → fp32 [ROWS, COLUMNS], or its transpose with WEIGHTS_FIRST.

    a [·, K] with scales [·, K/128] (none with QUANT_HERE: rounded in the loop), W [E, N, K] with scales
    [E, N/128, K/128]. WEIGHTS_FIRST puts the weights on the M side of the MMA, which for FP8 needs 64 rows:
    16 pairs fit on the N side, where M = 16 would fall back to fp16 MMAs.
    """
    k = tl.arange(0, BLOCK)
    columns = column_block * COLUMNS + tl.arange(0, COLUMNS)
    w_ptr += expert.to(tl.int64) * (N * K)
    if QUANT:
        ws_ptr += (expert * (N // BLOCK) + column_block * COLUMNS // BLOCK) * (K // BLOCK)
    if WEIGHTS_FIRST:
        a_ptrs = a_ptr + rows[None, :] * K + k[:, None]
        w_ptrs = w_ptr + columns[:, None] * K + k[None, :]
        total = tl.zeros([COLUMNS, ROWS], tl.float32)
    else:
        a_ptrs = a_ptr + rows[:, None] * K + k[None, :]
        w_ptrs = w_ptr + columns[None, :] * K + k[:, None]
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in tl.range(first_step, end_step):
        w = tl.load(w_ptrs + step * BLOCK)
        if QUANT_HERE:
            x = tl.load(a_ptrs + step * BLOCK).to(tl.float32)
            a, scale = quantize(x, 0 if WEIGHTS_FIRST else 1, w_ptr.dtype.element_ty)
        else:
            a = tl.load(a_ptrs + step * BLOCK)
            if QUANT:
                scale = tl.load(as_ptr + rows * (K // BLOCK) + step)
        if QUANT:
            scale *= tl.load(ws_ptr + step)
            if WEIGHTS_FIRST:
                total += tl.dot(w, a) * scale[None, :]
            else:
                total += tl.dot(a, w) * scale[:, None]
        elif WEIGHTS_FIRST:
            total = tl.dot(w, a, total)
        else:
            total = tl.dot(a, w, total)
    return total


@triton.jit
def _expert_tile(
    tile: tl.tensor,
    experts_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    ROWS: tl.constexpr,
    DIRECT: tl.constexpr,
):
    """(expert, positions [ROWS], valid [ROWS]) of one tile; direct: one pair, repeated to fill the MMA."""
    row = tl.arange(0, ROWS)
    if DIRECT:
        expert = tl.load(experts_ptr + tile).to(tl.int32)
        positions = tile + row * 0
        valid = row == 0
    else:
        expert, first, end = read_tile(tiles_ptr, tile)
        positions = tl.minimum(first + row, end - 1)
        valid = first + row < end
    return expert, positions, valid


@triton.jit
def _store_tile(
    out_ptr: tl.tensor,
    value: tl.tensor,
    rows: tl.tensor,
    valid: tl.tensor,
    column_block: tl.tensor,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
):
    columns = column_block * COLUMNS + tl.arange(0, COLUMNS)
    value = value.to(out_ptr.dtype.element_ty)
    if WEIGHTS_FIRST:
        tl.store(out_ptr + rows[None, :] * N + columns[:, None], value, mask=valid[None, :])
    else:
        tl.store(out_ptr + rows[:, None] * N + columns[None, :], value, mask=valid[:, None])


@triton.jit
def _slot_tile(
    tile: tl.tensor,
    slots_ptr: tl.tensor,
    token_order_ptr: tl.tensor,
    token_tiles_ptr: tl.tensor,
    tokens: tl.tensor,
    ROWS: tl.constexpr,
    DIRECT: tl.constexpr,
):
    """(slot, tokens [ROWS], valid [ROWS]) of one tile of tokens of one slot; slot −1: nothing to do.

    Direct batches are small enough for one tile to hold them all: the first token of each slot leads a tile
    of that slot's tokens, the others' tiles are empty.
    """
    row = tl.arange(0, ROWS)
    if DIRECT:
        slot = tl.load(slots_ptr + tile).to(tl.int32)
        valid = (row < tokens) & (tl.load(slots_ptr + row, mask=row < tokens, other=-1).to(tl.int32) == slot)
        leader = tl.min(tl.where(valid, row, ROWS), 0)
        slot = tl.where(leader == tile, slot, -1)
        token = tl.minimum(row, tokens - 1)
    else:
        live = tile < tl.load(token_tiles_ptr)
        bucket, first, end = read_tile(token_tiles_ptr, tile)
        slot = tl.where(live, bucket - 1, -1)
        valid = first + row < tl.where(live, end, first)
        token = tl.load(token_order_ptr + first + row, mask=valid, other=0)
    return slot, token, valid


@triton.jit
def _shrink_rider(
    rider: tl.tensor,
    x_ptr: tl.tensor,
    a13_ptr: tl.tensor,
    lora_scale_ptr: tl.tensor,
    u_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    token_order_ptr: tl.tensor,
    token_tiles_ptr: tl.tensor,
    tokens: tl.tensor,
    H: tl.constexpr,
    R2: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    SPLITS: tl.constexpr,
    DIRECT: tl.constexpr,
):
    """u[split, t] = s·A13·x[t] over one of SPLITS parts of H, for tokens of one slot.

    x [T, H], A13 [S, 2r, H], s [S] → u [SPLITS, T, 2r]; the reader sums the splits.
    """
    BLOCKS: tl.constexpr = (R2 + COLUMNS - 1) // COLUMNS
    STEPS: tl.constexpr = H // STEP
    PART: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    block = rider % BLOCKS
    split = rider // BLOCKS % SPLITS
    slot, token, valid = _slot_tile(
        rider // (BLOCKS * SPLITS), slots_ptr, token_order_ptr, token_tiles_ptr, tokens, ROWS, DIRECT
    )
    if slot >= 0:
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < R2
        k = tl.arange(0, STEP)
        x_ptrs = x_ptr + token[:, None] * H + k[None, :]
        a_ptrs = a13_ptr + slot.to(tl.int64) * (R2 * H) + column[None, :] * H + k[:, None]
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for step in tl.range(split * PART, tl.minimum(split * PART + PART, STEPS)):
            x = tl.load(x_ptrs + step * STEP)
            a = tl.load(a_ptrs + step * STEP, mask=inside[None, :], other=0.0)
            total = tl.dot(x, a, total)
        total *= tl.load(lora_scale_ptr + slot)
        u_ptrs = u_ptr + split * (tokens * R2) + token[:, None] * R2 + column[None, :]
        tl.store(u_ptrs, total.to(u_ptr.dtype.element_ty), mask=valid[:, None] & inside[None, :])


@triton.jit
def _expand_rider(
    rider: tl.tensor,
    parts_ptr: tl.tensor,
    b2_ptr: tl.tensor,
    lora_scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    token_order_ptr: tl.tensor,
    token_tiles_ptr: tl.tensor,
    tokens: tl.tensor,
    H: tl.constexpr,
    R: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXPAND: tl.constexpr,
    DIRECT: tl.constexpr,
    PDL: tl.constexpr,
):
    """low[t] = Σ_j parts[t, j] in a fixed order; with EXPAND, delta[t] = s·B2·low[t]; tokens of one slot.

    parts [T, PARTS, r], B2 [S, H, r], s [S] → delta [T, H] fp32 with EXPAND, else low [T, r] in B2's dtype.
    The factors are fetched before the wait: they are older than the launch that writes `parts`.
    """
    BLOCKS: tl.constexpr = ((H + COLUMNS - 1) // COLUMNS) if EXPAND else 1
    slot, token, valid = _slot_tile(
        rider // BLOCKS, slots_ptr, token_order_ptr, token_tiles_ptr, tokens, ROWS, DIRECT
    )
    if slot >= 0:
        rank = tl.arange(0, RANK)
        if EXPAND:
            column = rider % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
            b_ptrs = b2_ptr + slot.to(tl.int64) * (H * R) + column[None, :] * R + rank[:, None]
            b2 = tl.load(b_ptrs, mask=(rank < R)[:, None] & (column < H)[None, :], other=0.0)
        start_after_predecessor(PDL)
        # Sixteen parts at a time: summed one by one, Triton moves each of them into the layout of the MMA's
        # operand first, a trip through shared memory apiece (9 µs on a layer of 58).
        j = tl.arange(0, 16)[None, :, None]
        low = tl.zeros([ROWS, RANK], tl.float32)
        part_ptrs = parts_ptr + token[:, None, None] * (PARTS * R) + j * R + rank[None, None, :]
        live = valid[:, None] & (rank < R)[None, :]
        for first in tl.static_range(0, PARTS, 16):
            inside = live[:, None, :] & (first + j < PARTS)
            low += tl.sum(tl.load(part_ptrs + first * R, mask=inside, other=0.0), 1)
        if EXPAND:
            delta = tl.dot(low.to(b2_ptr.dtype.element_ty), b2) * tl.load(lora_scale_ptr + slot)
            at = token[:, None] * H + column[None, :]
            tl.store(out_ptr + at, delta, mask=valid[:, None] & (column < H)[None, :])
        else:
            at = token[:, None] * R + rank[None, :]
            tl.store(out_ptr + at, low.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["tokens", "pairs", "riders"])
def gate_up_kernel(
    a_ptr: tl.tensor,
    as_ptr: tl.tensor,
    w13_ptr: tl.tensor,
    s13_ptr: tl.tensor,
    out_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    x_ptr: tl.tensor,
    a13_ptr: tl.tensor,
    lora_scale_ptr: tl.tensor,
    u_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    token_order_ptr: tl.tensor,
    token_tiles_ptr: tl.tensor,
    tokens: tl.tensor,
    pairs: tl.tensor,
    riders: tl.tensor,
    H: tl.constexpr,
    I2: tl.constexpr,
    TOP_K: tl.constexpr,
    R2: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    RIDER_ROWS: tl.constexpr,
    RIDER_COLUMNS: tl.constexpr,
    RIDER_STEP: tl.constexpr,
    RIDER_SPLITS: tl.constexpr,
    LORA: tl.constexpr,
    QUANT: tl.constexpr,
    DIRECT: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[split, position] = W13_e·x over one of SPLITS parts of H; riders: u = s·A13·x.

    a = x [T, H] rounded (scales [T, H/128]), or x itself where DIRECT rounds it in the loop or nothing is
    quantised; W13 [E, 2I, H] → out [SPLITS, T·k, 2I], rows in sorted position.
    """
    start_after_predecessor(PDL)
    pid = tl.program_id(0)
    if pid < riders:
        if LORA:
            _shrink_rider(
                pid, x_ptr, a13_ptr, lora_scale_ptr, u_ptr, slots_ptr, token_order_ptr, token_tiles_ptr,
                tokens, H, R2, RIDER_ROWS, RIDER_COLUMNS, RIDER_STEP, RIDER_SPLITS, DIRECT,
            )  # fmt: skip
    else:
        BLOCKS: tl.constexpr = I2 // COLUMNS
        STEPS: tl.constexpr = H // BLOCK
        PART: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
        program = pid - riders
        block = program % BLOCKS
        split = program // BLOCKS % SPLITS
        tile = program // (BLOCKS * SPLITS)
        tile_count = pairs if DIRECT else tl.load(tiles_ptr)
        if tile < tile_count:
            expert, positions, valid = _expert_tile(tile, experts_ptr, tiles_ptr, ROWS, DIRECT)
            pair = positions if DIRECT else tl.load(order_ptr + positions)
            total = _expert_product(
                a_ptr, as_ptr, w13_ptr, s13_ptr, expert, pair // TOP_K, block,
                split * PART, tl.minimum(split * PART + PART, STEPS),
                I2, H, ROWS, COLUMNS, QUANT, QUANT and DIRECT, WEIGHTS_FIRST,
            )  # fmt: skip
            out_ptr += split * (pairs * I2)
            _store_tile(out_ptr, total, positions, valid, block, I2, COLUMNS, WEIGHTS_FIRST)


@triton.jit(do_not_specialize=["tokens", "pairs", "riders"])
def down_kernel(
    h_ptr: tl.tensor,
    hs_ptr: tl.tensor,
    w2_ptr: tl.tensor,
    s2_ptr: tl.tensor,
    y_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    b2_ptr: tl.tensor,
    lora_scale_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    token_order_ptr: tl.tensor,
    token_tiles_ptr: tl.tensor,
    tokens: tl.tensor,
    pairs: tl.tensor,
    riders: tl.tensor,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    R: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    RIDER_ROWS: tl.constexpr,
    RIDER_COLUMNS: tl.constexpr,
    EXPAND: tl.constexpr,
    LORA: tl.constexpr,
    QUANT: tl.constexpr,
    DIRECT: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[pair] = W2_e·h[position]; riders: see `_expand_rider`.

    h [T·k, I] in sorted position (scales [T·k, I/128]), W2 [E, H, I] → y [T·k, H] by pair, not yet weighted.
    """
    pid = tl.program_id(0)
    if pid < riders:
        if LORA:
            _expand_rider(
                pid, parts_ptr, b2_ptr, lora_scale_ptr, delta_ptr, slots_ptr, token_order_ptr,
                token_tiles_ptr, tokens, H, R, RANK, PARTS, RIDER_ROWS, RIDER_COLUMNS, EXPAND, DIRECT, PDL,
            )  # fmt: skip
    else:
        start_after_predecessor(PDL)
        BLOCKS: tl.constexpr = H // COLUMNS
        program = pid - riders
        block = program % BLOCKS
        tile = program // BLOCKS
        tile_count = pairs if DIRECT else tl.load(tiles_ptr)
        if tile < tile_count:
            expert, positions, valid = _expert_tile(tile, experts_ptr, tiles_ptr, ROWS, DIRECT)
            total = _expert_product(
                h_ptr, hs_ptr, w2_ptr, s2_ptr, expert, positions, block, 0, I // BLOCK,
                H, I, ROWS, COLUMNS, QUANT, False, WEIGHTS_FIRST,
            )  # fmt: skip
            pair = positions if DIRECT else tl.load(order_ptr + positions)
            _store_tile(y_ptr, total, pair, valid, block, H, COLUMNS, WEIGHTS_FIRST)
