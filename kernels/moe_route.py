"""Routing on the device: pairs that share an expert become neighbours and are cut into tiles.

A *pair* is one (token, expert). Sorting is a counting sort: count each bucket, sum the counts, place each
pair. A bucket is an expert, or an (expert, slot) where the LoRA branch wants tiles of one adapter. Where a
pair lands inside its bucket depends on the order of atomics; nothing that is computed depends on it.

A *tile list* is int32 [1 + ·, 4]: row 0 holds how many tiles there are, the others (bucket, first position,
end position, unused).
"""

# Triton's types exist when a kernel is traced, not before.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportUnknownParameterType=false, reportOperatorIssue=false, reportCallIssue=false

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCK = tl.constexpr(128)  # the FP8 group, as in fp8.py
E4M3_MAX = tl.constexpr(448.0)


@triton.jit
def start_after_predecessor(PDL: tl.constexpr):
    """Programmatic dependent launch: wait for the kernel before, then let the kernel after come up.

    In this order a kernel may, before it waits, read whatever is older than its direct predecessor.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def quantize(x: tl.tensor, axis: tl.constexpr, dtype: tl.constexpr):
    """Round groups of 128 along `axis` to e4m3: x fp32 → (q in `dtype`, scale fp32), x = q · scale."""
    scale = tl.maximum(tl.max(tl.abs(x), axis), 1e-10) * (1.0 / E4M3_MAX)
    q = x * tl.expand_dims(1.0 / scale, axis)
    return tl.minimum(tl.maximum(q, -E4M3_MAX), E4M3_MAX).to(dtype), scale


@triton.jit
def read_tile(tiles_ptr: tl.tensor, tile: tl.tensor):
    """(bucket, first, end) of one tile. Grids are fixed: ask `tile < tl.load(tiles_ptr)` first."""
    entry = tiles_ptr + (1 + tile) * 4
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)


@triton.jit
def _buckets(
    experts_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    pair: tl.tensor,
    valid: tl.tensor,
    TOP_K: tl.constexpr,
    LANES: tl.constexpr,
):
    """A pair's bucket: expert·LANES + slot + 1 (slot −1, the base, comes first); its expert if LANES = 1."""
    bucket = tl.load(experts_ptr + pair, mask=valid, other=0).to(tl.int32) * LANES
    if LANES > 1:
        bucket += tl.load(slots_ptr + pair // TOP_K, mask=valid, other=-1).to(tl.int32) + 1
    return bucket


@triton.jit
def _count(
    experts_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    start: tl.tensor,
    n: tl.tensor,
    TOP_K: tl.constexpr,
    LANES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Count pairs [start, start + CHUNK) into their buckets; each keeps its rank within its bucket."""
    i = start + tl.arange(0, CHUNK)
    valid = i < n
    bucket = _buckets(experts_ptr, slots_ptr, i, valid, TOP_K, LANES)
    rank = tl.atomic_add(counts_ptr + bucket, 1, mask=valid, sem="relaxed")
    tl.store(ranks_ptr + i, rank, mask=valid)


@triton.jit
def _sum_counts(counts_ptr: tl.tensor, starts_ptr: tl.tensor, BUCKETS: tl.constexpr, CHUNK: tl.constexpr):
    """starts[b] = Σ counts[<b]. Counts came by atomics, so they are read past the L1 cache."""
    total = tl.zeros([], tl.int32)
    for first in tl.range(0, BUCKETS, CHUNK):
        bucket = first + tl.arange(0, CHUNK)
        count = tl.load(counts_ptr + bucket, cache_modifier=".cg")
        tl.store(starts_ptr + bucket, tl.cumsum(count, 0) - count + total)
        total += tl.sum(count, 0)


@triton.jit
def _list_tiles(
    counts_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    worker: tl.tensor,
    workers: tl.tensor,
    HEIGHT: tl.constexpr,
    BUCKETS: tl.constexpr,
    CHUNK: tl.constexpr,
    MERGE: tl.constexpr,
):
    """Cut every MERGE buckets into tiles of at most HEIGHT items; `workers` programs share the writing."""
    first_row = tl.zeros([], tl.int32)
    first_tile = tl.zeros([], tl.int32)
    for first in tl.range(0, BUCKETS, CHUNK):
        count = tl.load(counts_ptr + first + tl.arange(0, CHUNK), cache_modifier=".cg")
        if MERGE > 1:
            count = tl.sum(tl.reshape(count, [CHUNK // MERGE, MERGE]), 1)
        bucket = first // MERGE + tl.arange(0, CHUNK // MERGE)
        start = first_row + tl.cumsum(count, 0) - count
        tiles = (count + HEIGHT - 1) // HEIGHT
        at = first_tile + tl.cumsum(tiles, 0) - tiles
        for j in tl.range(worker, tl.max(tiles, 0), workers):
            entry = tiles_ptr + (1 + at + j) * 4
            tl.store(entry, bucket, mask=j < tiles)
            tl.store(entry + 1, start + j * HEIGHT, mask=j < tiles)
            tl.store(entry + 2, tl.minimum(start + (j + 1) * HEIGHT, start + count), mask=j < tiles)
        first_row += tl.sum(count, 0)
        first_tile += tl.sum(tiles, 0)
    tl.store(tiles_ptr, first_tile)


@triton.jit
def _list_long_runs(counts_ptr: tl.tensor, tiles_ptr: tl.tensor, HEIGHT: tl.constexpr, BUCKETS: tl.constexpr):
    """`_list_tiles` for few buckets of many tiles: 64 tiles at a time, each looking for its bucket."""
    buckets = tl.arange(0, BUCKETS)[None, :]
    count = tl.load(counts_ptr + buckets, cache_modifier=".cg")
    end = tl.cumsum(count, 1)
    tiles = (count + HEIGHT - 1) // HEIGHT
    end_tile = tl.cumsum(tiles, 1)
    total = tl.sum(tiles)
    for first in tl.range(0, total, 64):
        tile = first + tl.arange(0, 64)
        before = end_tile <= tile[:, None]
        bucket = tl.sum(before.to(tl.int32), 1)
        nth = tile - tl.sum(tl.where(before, tiles, 0), 1)
        start = tl.sum(tl.where(before, count, 0), 1) + nth * HEIGHT
        limit = tl.sum(tl.where(buckets == bucket[:, None], end, 0), 1)
        entry = tiles_ptr + (1 + tile) * 4
        tl.store(entry, bucket, mask=tile < total)
        tl.store(entry + 1, start, mask=tile < total)
        tl.store(entry + 2, tl.minimum(start + HEIGHT, limit), mask=tile < total)
    tl.store(tiles_ptr, total)


@triton.jit
def _place(
    experts_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    order_ptr: tl.tensor,
    start: tl.tensor,
    n: tl.tensor,
    TOP_K: tl.constexpr,
    LANES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """order[position] = pair, for pairs [start, start + CHUNK)."""
    i = start + tl.arange(0, CHUNK)
    valid = i < n
    bucket = _buckets(experts_ptr, slots_ptr, i, valid, TOP_K, LANES)
    position = tl.load(starts_ptr + bucket, mask=valid, other=0, cache_modifier=".cg")
    position += tl.load(ranks_ptr + i, mask=valid, other=0, cache_modifier=".cg")
    tl.store(order_ptr + position, i, mask=valid)


@triton.jit
def _count_tokens(
    slots_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    start: tl.tensor,
    tokens: tl.tensor,
    BUCKETS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Count tokens [start, start + CHUNK) by slot; the few buckets are crowded, so one atomic each."""
    token = start + tl.arange(0, CHUNK)
    bucket = tl.load(slots_ptr + token, mask=token < tokens, other=BUCKETS).to(tl.int32) + 1
    mine = bucket[:, None] == tl.arange(0, BUCKETS)[None, :]
    count = mine.to(tl.int32)
    before = tl.atomic_add(counts_ptr + tl.arange(0, BUCKETS), tl.sum(count, 0), sem="relaxed")
    rank = tl.sum(tl.where(mine, tl.cumsum(count, 0) - 1 + before[None, :], 0), 1)
    tl.store(ranks_ptr + token, rank, mask=token < tokens)


@triton.jit
def _order_tokens(
    slots_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    order_ptr: tl.tensor,
    token_tiles_ptr: tl.tensor,
    mix_tiles_ptr: tl.tensor,
    tokens: tl.tensor,
    BUCKETS: tl.constexpr,
    TOKEN_ROWS: tl.constexpr,
    MIX_ROWS: tl.constexpr,
):
    """Place all counted tokens by slot, and cut them into tiles of either height (one list if they agree)."""
    _sum_counts(counts_ptr, starts_ptr, BUCKETS, BUCKETS)
    _list_long_runs(counts_ptr, token_tiles_ptr, TOKEN_ROWS, BUCKETS)
    if MIX_ROWS != TOKEN_ROWS:
        _list_long_runs(counts_ptr, mix_tiles_ptr, MIX_ROWS, BUCKETS)
    tl.debug_barrier()
    for start in tl.range(0, tokens, 1024):
        token = start + tl.arange(0, 1024)
        bucket = tl.load(slots_ptr + token, mask=token < tokens, other=-1).to(tl.int32) + 1
        position = tl.load(starts_ptr + bucket, cache_modifier=".cg")
        position += tl.load(ranks_ptr + token, mask=token < tokens, other=0, cache_modifier=".cg")
        tl.store(order_ptr + position, token, mask=token < tokens)


@triton.jit(do_not_specialize=["tokens", "pairs"])
def prepare_kernel(
    x_ptr: tl.tensor,
    xq_ptr: tl.tensor,
    xs_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    lane_tiles_ptr: tl.tensor,
    token_counts_ptr: tl.tensor,
    token_starts_ptr: tl.tensor,
    token_ranks_ptr: tl.tensor,
    token_order_ptr: tl.tensor,
    token_tiles_ptr: tl.tensor,
    mix_tiles_ptr: tl.tensor,
    tokens: tl.tensor,
    pairs: tl.tensor,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    BUCKETS: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    SLOT_BUCKETS: tl.constexpr,
    COUNTERS: tl.constexpr,
    TOKEN_COUNTERS: tl.constexpr,
    PAIR_CHUNK: tl.constexpr,
    TOKEN_CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    LANE_ROWS: tl.constexpr,
    TOKEN_ROWS: tl.constexpr,
    MIX_ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    QUANT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sort the pairs by expert, sort the tokens by slot and quantise x, each in programs of its own.

    experts [T, k], slots [T], x [T, H] → order [T·k] with tiles of ROWS pairs of one expert and, where LANES
    > 1, of LANE_ROWS pairs of one (expert, slot); token_order [T] with tiles of TOKEN_ROWS (for the riders)
    and MIX_ROWS (for `combine_expand_kernel`) tokens of one slot; xq, xs as `fp8.quantize_groups`.
    With COUNTERS > 1 pairs and tokens are only counted: `scatter_kernel` places them. Every counter must be
    zero at the start; the activation kernel leaves them so. TOKEN_COUNTERS is 0 without LoRA.
    """
    start_after_predecessor(PDL)
    pid = tl.program_id(0)
    sorters = COUNTERS + TOKEN_COUNTERS
    if pid < COUNTERS:
        start = pid * PAIR_CHUNK
        _count(experts_ptr, slots_ptr, counts_ptr, ranks_ptr, start, pairs, TOP_K, LANES, PAIR_CHUNK)
        if COUNTERS == 1:
            tl.debug_barrier()
            _sum_counts(counts_ptr, starts_ptr, BUCKETS, CHUNK)
            _list_tiles(counts_ptr, tiles_ptr, 0, 1, ROWS, BUCKETS, CHUNK, LANES)
            if LANES > 1:
                _list_tiles(counts_ptr, lane_tiles_ptr, 0, 1, LANE_ROWS, BUCKETS, CHUNK, 1)
            tl.debug_barrier()
            _place(
                experts_ptr, slots_ptr, starts_ptr, ranks_ptr, order_ptr, 0, pairs, TOP_K, LANES, PAIR_CHUNK
            )
    elif pid < sorters:
        start = (pid - COUNTERS) * TOKEN_CHUNK
        _count_tokens(slots_ptr, token_counts_ptr, token_ranks_ptr, start, tokens, SLOT_BUCKETS, TOKEN_CHUNK)
        if COUNTERS == 1:
            for later in tl.range(TOKEN_CHUNK, tokens, TOKEN_CHUNK):
                _count_tokens(
                    slots_ptr, token_counts_ptr, token_ranks_ptr, later, tokens, SLOT_BUCKETS, TOKEN_CHUNK
                )
            tl.debug_barrier()
            _order_tokens(
                slots_ptr, token_counts_ptr, token_starts_ptr, token_ranks_ptr, token_order_ptr,
                token_tiles_ptr, mix_tiles_ptr, tokens, SLOT_BUCKETS, TOKEN_ROWS, MIX_ROWS,
            )  # fmt: skip
    elif QUANT:
        group = (pid - sorters) * GROUPS + tl.arange(0, GROUPS)
        inside = group < tokens * (H // BLOCK)
        at = group[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        x = tl.load(x_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
        q, scale = quantize(x, 1, xq_ptr.dtype.element_ty)
        tl.store(xq_ptr + at, q, mask=inside[:, None])
        tl.store(xs_ptr + group, scale, mask=inside)


@triton.jit(do_not_specialize=["tokens", "pairs"])
def scatter_kernel(
    experts_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    lane_tiles_ptr: tl.tensor,
    token_counts_ptr: tl.tensor,
    token_starts_ptr: tl.tensor,
    token_ranks_ptr: tl.tensor,
    token_order_ptr: tl.tensor,
    token_tiles_ptr: tl.tensor,
    mix_tiles_ptr: tl.tensor,
    tokens: tl.tensor,
    pairs: tl.tensor,
    TOP_K: tl.constexpr,
    BUCKETS: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    SLOT_BUCKETS: tl.constexpr,
    COUNTERS: tl.constexpr,
    PAIR_CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    LANE_ROWS: tl.constexpr,
    TOKEN_ROWS: tl.constexpr,
    MIX_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Second half of a large sort: place the counted pairs and list their tiles; one program for the tokens.

    One sort by (expert, slot) serves both the GEMMs and the activation kernel. Every program sums the counts
    for itself (a launch less); program 0 lists the GEMM tiles, the others share the activation tiles.
    """
    start_after_predecessor(PDL)
    pid = tl.program_id(0)
    if pid < COUNTERS:
        starts_ptr += pid * BUCKETS
        _sum_counts(counts_ptr, starts_ptr, BUCKETS, CHUNK)
        tl.debug_barrier()
        start = pid * PAIR_CHUNK
        _place(
            experts_ptr, slots_ptr, starts_ptr, ranks_ptr, order_ptr, start, pairs, TOP_K, LANES, PAIR_CHUNK
        )
        if pid == 0:
            _list_tiles(counts_ptr, tiles_ptr, 0, 1, ROWS, BUCKETS, CHUNK, LANES)
        elif LANES > 1:
            _list_tiles(counts_ptr, lane_tiles_ptr, pid - 1, COUNTERS - 1, LANE_ROWS, BUCKETS, CHUNK, 1)
    else:
        _order_tokens(
            slots_ptr, token_counts_ptr, token_starts_ptr, token_ranks_ptr, token_order_ptr,
            token_tiles_ptr, mix_tiles_ptr, tokens, SLOT_BUCKETS, TOKEN_ROWS, MIX_ROWS,
        )  # fmt: skip
