"""Between the two GEMMs: B13's delta, SwiGLU, the rounding of h, and A2's part of the down side.

    [g;v] += B13_e·u        u = s·A13·x comes from the riders of `gate_up_kernel`
    h      = silu(g) ⊙ v    rounded to e4m3 in groups of 128 for the next GEMM
    parts  = p_e·A2_e·h     from the unrounded h, one part per 128 columns of h

Three kernels for three kinds of batch: base rows only; few rows per factor (a program per pair, vector
arithmetic); many rows per factor (tiles of one (expert, slot), MMAs). All leave the counters of
`prepare_kernel` at zero for the next layer.
"""

# Triton's types exist when a kernel is traced, not before.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportUnknownParameterType=false, reportOperatorIssue=false, reportCallIssue=false

import triton
import triton.language as tl

from .moe_route import BLOCK, quantize, read_tile, start_after_predecessor


@triton.jit
def _swiglu(g: tl.tensor, v: tl.tensor, FAST: tl.constexpr):
    """silu(g) ⊙ v. FAST: the chip's own exp2 and reciprocal, 4 instructions where a division takes 12."""
    if FAST:
        sigmoid = tl.inline_asm_elementwise(
            """{ .reg .f32 t;
            ex2.approx.ftz.f32 t, $1;
            add.f32 t, t, 0f3f800000;
            rcp.approx.ftz.f32 $0, t; }""",
            "=f,f",
            [g * -1.4426950408889634],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
        return g * sigmoid * v
    return g / (1.0 + tl.exp(-g)) * v


@triton.jit
def _clear(counts_ptr: tl.tensor, COUNTERS: tl.constexpr):
    """Zero the routing counters, in the first program of the grid."""
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        for start in tl.range(0, COUNTERS, 1024):
            at = start + tl.arange(0, 1024)
            tl.store(counts_ptr + at, tl.zeros([1024], tl.int32), mask=at < COUNTERS)


@triton.jit(do_not_specialize=["pairs"])
def activate_base_kernel(
    gate_up_ptr: tl.tensor,
    h_ptr: tl.tensor,
    hs_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    pairs: tl.tensor,
    I: tl.constexpr,  # noqa: E741
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    COUNTERS: tl.constexpr,
    QUANT: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """h = silu(g) ⊙ v for a batch of base rows: gate_up [SPLITS, P, 2I] → h [P, I], scales [P, I/128]."""
    start_after_predecessor(PDL)
    _clear(counts_ptr, COUNTERS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = (row < pairs)[:, None]
    g_ptrs = gate_up_ptr + row[:, None] * (2 * I) + column[None, :]
    g = tl.load(g_ptrs, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(g_ptrs + I, mask=inside, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        g += tl.load(g_ptrs + split * (pairs * 2 * I), mask=inside, other=0.0)
        v += tl.load(g_ptrs + split * (pairs * 2 * I) + I, mask=inside, other=0.0)
    h = _swiglu(g, v, FAST)
    at = row[:, None] * I + column[None, :]
    if QUANT:
        q, scale = quantize(h, 1, h_ptr.dtype.element_ty)
        tl.store(h_ptr + at, q, mask=inside)
        tl.store(hs_ptr + row * (I // BLOCK) + block, scale, mask=row < pairs)
    else:
        tl.store(h_ptr + at, h.to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "pairs"])
def activate_pairs_kernel(
    gate_up_ptr: tl.tensor,
    h_ptr: tl.tensor,
    hs_ptr: tl.tensor,
    u_ptr: tl.tensor,
    b13_ptr: tl.tensor,
    a2_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    order_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    tokens: tl.tensor,
    pairs: tl.tensor,
    E: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    R: tl.constexpr,
    RANK: tl.constexpr,
    TOP_K: tl.constexpr,
    SPLITS: tl.constexpr,
    RIDER_SPLITS: tl.constexpr,
    COUNTERS: tl.constexpr,
    QUANT: tl.constexpr,
    FAST: tl.constexpr,
    DIRECT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One pair and 128 columns of h per program; grid (P, I/128).

    gate_up [SPLITS, P, 2I] and u [RIDER_SPLITS, T, 2r] are sums in parts; B13 [S, E, 2I, r], A2 [S, E, r, I]
    → h [P, I], scales [P, I/128], both in sorted position; parts [P, I/128, r] by pair (nothing for base
    rows). The factors need only the routing, so they are on their way before the wait for the GEMM.
    """
    position = tl.program_id(0)
    block = tl.program_id(1)
    pair = position if DIRECT else tl.load(order_ptr + position)
    token = pair // TOP_K
    slot = tl.load(slots_ptr + token).to(tl.int32)
    bank = tl.maximum(slot, 0).to(tl.int64) * E + tl.load(experts_ptr + pair).to(tl.int32)
    column = block * BLOCK + tl.arange(0, BLOCK)
    rank = tl.arange(0, RANK)
    live = rank < tl.where(slot >= 0, R, 0)
    b_ptrs = b13_ptr + bank * (2 * I * R) + column[:, None] * R + rank[None, :]
    bg = tl.load(b_ptrs, mask=live[None, :], other=0.0)
    bv = tl.load(b_ptrs + I * R, mask=live[None, :], other=0.0)
    a2 = tl.load(a2_ptr + bank * (R * I) + rank[:, None] * I + column[None, :], mask=live[:, None], other=0.0)
    weight = tl.load(weights_ptr + pair)

    start_after_predecessor(PDL)
    _clear(counts_ptr, COUNTERS)
    g_ptrs = gate_up_ptr + position * (2 * I) + column
    g = tl.load(g_ptrs).to(tl.float32)
    v = tl.load(g_ptrs + I).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        g += tl.load(g_ptrs + split * (pairs * 2 * I))
        v += tl.load(g_ptrs + split * (pairs * 2 * I) + I)
    u_ptrs = u_ptr + token * (2 * R) + rank
    ug = tl.load(u_ptrs, mask=live, other=0.0).to(tl.float32)
    uv = tl.load(u_ptrs + R, mask=live, other=0.0).to(tl.float32)
    for split in tl.static_range(1, RIDER_SPLITS):
        ug += tl.load(u_ptrs + split * (tokens * 2 * R), mask=live, other=0.0)
        uv += tl.load(u_ptrs + split * (tokens * 2 * R) + R, mask=live, other=0.0)
    g += tl.sum(bg.to(tl.float32) * ug[None, :], 1)
    v += tl.sum(bv.to(tl.float32) * uv[None, :], 1)
    h = _swiglu(g, v, FAST)
    if QUANT:
        q, scale = quantize(h, 0, h_ptr.dtype.element_ty)
        tl.store(h_ptr + position * I + column, q)
        tl.store(hs_ptr + position * (I // BLOCK) + block, scale)
    else:
        tl.store(h_ptr + position * I + column, h.to(h_ptr.dtype.element_ty))
    part = tl.sum(a2.to(tl.float32) * h[None, :], 1) * weight
    tl.store(parts_ptr + (pair * (I // BLOCK) + block) * R + rank, part, mask=live)


@triton.jit(do_not_specialize=["tokens"])
def activate_tiles_kernel(
    gate_up_ptr: tl.tensor,
    h_ptr: tl.tensor,
    hs_ptr: tl.tensor,
    u_ptr: tl.tensor,
    b13_ptr: tl.tensor,
    a2_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    tokens: tl.tensor,
    E: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    R: tl.constexpr,
    RANK: tl.constexpr,
    TOP_K: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    RIDER_SPLITS: tl.constexpr,
    COUNTERS: tl.constexpr,
    QUANT: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Tiles of pairs of one (expert, slot) and 128 columns of h, ROWS pairs at a time.

    Shapes as in `activate_pairs_kernel`, with one split of gate_up; `tiles` lists buckets
    expert·LANES + slot + 1. Grid (any number of programs, I/128): programs take tiles in turn, for how many
    there are is known on the device only. The factors are read once per tile.
    """
    start_after_predecessor(PDL)
    _clear(counts_ptr, COUNTERS)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    rank = tl.arange(0, RANK)
    for tile in tl.range(tl.program_id(0), tl.load(tiles_ptr), tl.num_programs(0)):
        bucket, first, end = read_tile(tiles_ptr, tile)
        slot = bucket % LANES - 1
        adapted = slot >= 0
        bank = tl.maximum(slot, 0).to(tl.int64) * E + bucket // LANES
        live = rank < tl.where(adapted, R, 0)
        b_ptrs = b13_ptr + bank * (2 * I * R) + column[None, :] * R + rank[:, None]
        bg = tl.load(b_ptrs, mask=live[:, None], other=0.0)
        bv = tl.load(b_ptrs + I * R, mask=live[:, None], other=0.0)
        a_ptrs = a2_ptr + bank * (R * I) + rank[None, :] * I + column[:, None]
        a2 = tl.load(a_ptrs, mask=live[None, :], other=0.0)
        for start in tl.range(first, end, ROWS):
            valid = start + tl.arange(0, ROWS) < end
            row = tl.minimum(start + tl.arange(0, ROWS), end - 1)
            pair = tl.load(order_ptr + row)
            g_ptrs = gate_up_ptr + row[:, None] * (2 * I) + column[None, :]
            g = tl.load(g_ptrs).to(tl.float32)
            v = tl.load(g_ptrs + I).to(tl.float32)
            u_ptrs = u_ptr + (pair // TOP_K)[:, None] * (2 * R) + rank[None, :]
            ug = tl.load(u_ptrs, mask=live[None, :], other=0.0)
            uv = tl.load(u_ptrs + R, mask=live[None, :], other=0.0)
            for split in tl.static_range(1, RIDER_SPLITS):
                ug += tl.load(u_ptrs + split * (tokens * 2 * R), mask=live[None, :], other=0.0)
                uv += tl.load(u_ptrs + split * (tokens * 2 * R) + R, mask=live[None, :], other=0.0)
            g += tl.dot(ug.to(bg.dtype), bg)
            v += tl.dot(uv.to(bg.dtype), bv)
            h = _swiglu(g, v, FAST)
            at = row[:, None] * I + column[None, :]
            if QUANT:
                q, scale = quantize(h, 1, h_ptr.dtype.element_ty)
                tl.store(h_ptr + at, q, mask=valid[:, None])
                tl.store(hs_ptr + row * (I // BLOCK) + block, scale, mask=valid)
            else:
                tl.store(h_ptr + at, h.to(h_ptr.dtype.element_ty), mask=valid[:, None])
            # In a region of its own: side by side, Triton takes this MMA and those above for a chain as in
            # attention and gives every warp the same columns.
            if adapted:
                weight = tl.load(weights_ptr + pair)
                part = tl.dot(h.to(a2.dtype), a2) * weight[:, None]
                part_ptrs = parts_ptr + (pair * (I // BLOCK) + block)[:, None] * R + rank[None, :]
                tl.store(part_ptrs, part, mask=valid[:, None] & live[None, :])
